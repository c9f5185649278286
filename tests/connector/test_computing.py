"""How long the server takes to compute a chunk is read off its calls."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.connector.computing import MOST_STEPS, Computing
from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.core.request import MOST_REQUESTS
from kvstore.testing.manager import keys_from
from tests.connector.test_steps import leave_on_disk, open_manager, store


class Told:
    """A `Computing` and what it has told."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, float]] = []
        self.computing = Computing(lambda chunks, seconds: self.samples.append((chunks, seconds)))

    def step(self, *offers: tuple[str, list[bytes]], at: float, takes: float = 1.0) -> None:
        """A step that ends at a time, offers chunks and is computed."""
        self.computing.step_began()
        self.computing.step_ended(at)
        for request, keys in offers:
            self.computing.offered(request, keys)
        self.computing.step_reported(at + takes)


def test_a_step_computes_what_it_offers_from_the_first_miss_on() -> None:
    told = Told()
    keys = keys_from(0, 10)
    told.computing.missed("r", keys[4])
    told.step(("r", keys[:8]), at=1.0, takes=2.0)
    assert told.samples == [(4, 2.0)], "the device had the first four"
    told.step(("r", keys[8:]), at=5.0, takes=1.0)
    assert told.samples[1:] == [(2, 1.0)], "the rest of a long prompt"


def test_what_is_offered_before_the_end_of_a_step_belongs_to_it_too() -> None:
    told = Told()
    keys = keys_from(0, 4)
    told.computing.missed("r", keys[0])
    told.computing.step_began()
    told.computing.offered("r", keys)
    told.computing.step_ended(1.0)
    told.computing.step_began()
    told.computing.step_ended(2.0)
    told.computing.step_reported(3.0)
    told.computing.step_reported(3.5)
    assert told.samples == [(4, 2.0)]


def test_a_step_that_was_handed_over_while_another_ran_begins_when_that_has_ended() -> None:
    told = Told()
    keys = keys_from(0, 8)
    told.computing.missed("r", keys[0])
    told.computing.step_ended(1.0)
    told.computing.offered("r", keys[:4])
    told.computing.step_began()
    told.computing.step_ended(1.1)
    told.computing.offered("r", keys[4:])
    told.computing.step_reported(3.0)
    told.computing.step_reported(6.0)
    assert told.samples == [(4, 2.0), (4, 3.0)]


def test_prompts_that_were_not_missed_and_single_chunks_say_nothing() -> None:
    told = Told()
    keys = keys_from(0, 9)
    told.step(("whole", keys), at=1.0)
    told.computing.missed("r", keys[0])
    told.step(("r", keys[:1]), at=3.0)
    told.step(("r", keys[1:2]), at=5.0)
    told.computing.missed("gone", keys[0])
    told.computing.finished("gone")
    told.step(("gone", keys), at=7.0)
    # Nor does a chunk of each group.
    told.computing.opened("r", place)
    told.computing.decided("r", 0)
    told.step(("r", [ATTENTION[0], STATES[0]]), at=9.0)
    assert told.samples == []


def test_of_several_groups_the_one_that_was_missed_counts() -> None:
    told = Told()
    full = [b"f%02d" % n + b"\0\0\0\0" for n in range(8)]
    window = [b"w%02d" % n + b"\0\0\0\1" for n in range(8)]
    told.computing.missed("r", full[5])
    told.step(("r", [*full, *window[6:]]), at=1.0)
    told.computing.missed("s", full[5])
    told.step(("s", [*full, *window]), at=3.0)
    assert told.samples == [(3, 1.0), (3, 1.0)]


ATTENTION = [b"a%02d" % n + b"\0\0\0\0" for n in range(8)]
STATES = [b"s%02d" % n + b"\0\0\0\1" for n in range(8)]


def place(key: bytes) -> int:
    """Chunks of 16 tokens."""
    return 16 * (int(key[1:3]) + 1)


def test_where_places_are_known_what_lies_behind_the_first_computed_token_counts() -> None:
    """A recurrent layer misses states at boundaries at which none is ever kept."""
    told = Told()
    told.computing.opened("r", place)
    for key in STATES[:2:-1]:
        told.computing.missed("r", key)
    told.step(("r", [*ATTENTION, STATES[2], STATES[7]]), at=1.0)
    assert told.samples == [(5, 1.0)], "three were loaded"


def test_a_server_that_tells_where_it_begins_is_believed() -> None:
    told = Told()
    told.computing.opened("r", place)
    told.computing.decided("r", 32)
    told.step(("r", [*ATTENTION[:4], STATES[3]]), at=1.0)
    told.step(("r", [*ATTENTION[4:], STATES[7]]), at=3.0, takes=2.0)
    assert told.samples == [(2, 1.0), (4, 2.0)]


@pytest.mark.parametrize("placed", [False, True])
def test_what_is_offered_again_because_there_was_no_room_counts_once(placed: bool) -> None:
    told = Told()
    told.computing.opened("r", place if placed else None)
    told.computing.missed("r", ATTENTION[2])
    for at in (1.0, 3.0):
        told.step(("r", ATTENTION[:6]), at=at)
    told.step(("r", ATTENTION), at=5.0)
    assert told.samples == [(4, 1.0), (2, 1.0)]


def test_whether_the_server_computes_is_known_until_its_steps_are_reported() -> None:
    computing = Told().computing
    assert computing.under_way is False
    computing.step_ended(1.0, True)
    computing.step_ended(2.0, False)
    assert computing.under_way is True, "the step before has begun only now"
    computing.step_reported(3.0)
    assert computing.under_way is False
    computing.step_ended(4.0)
    assert computing.under_way is None, "this one does not tell"


def test_requests_whose_end_is_not_reported_are_forgotten() -> None:
    told = Told()
    for number in range(MOST_REQUESTS + 10):
        told.computing.opened(str(number), place)
    assert len(told.computing._prompts) == MOST_REQUESTS


def test_a_server_that_reports_no_steps_says_nothing_and_costs_no_memory() -> None:
    told = Told()
    for step in range(10 * MOST_STEPS):
        told.computing.step_began()
        told.computing.step_ended(float(step))
    assert len(told.computing._steps) <= MOST_STEPS
    told = Told()
    told.computing.step_reported(1.0)
    assert told.samples == []


def compute(manager: KVStoreManager, name: str, keys: list[bytes], seconds: float) -> int:
    """A request as a server serves it, which takes so long to compute; its leading hits."""
    who = ReqContext(name)
    manager.on_new_request(who)
    while (found := manager.lookup_prefix(keys, who)) is None:
        manager.on_schedule_end()
        manager.on_step_reported()
        time.sleep(0.001)
    if found:
        manager.prepare_load(keys[:found], who)
        manager.complete_load(keys[:found], who)
    manager.on_schedule_end()
    stored = store(manager, keys[found:], who)
    time.sleep(seconds)
    manager.on_step_reported()
    manager.on_request_finished(who)
    assert len(stored) == len(keys) - found
    return found


def test_a_manager_learns_the_pace_from_its_server_and_loads_what_a_disk_has_sooner(
    tmp_path: Path,
) -> None:
    held = keys_from(0, 12)
    leave_on_disk(tmp_path, held)
    manager = open_manager(tmp_path, rows=64)
    began = time.monotonic()
    assert compute(manager, "first", keys_from(1000, 12), 0.6) == 0
    # However long the machine lets it sleep.
    assert 0.05 <= manager.stats().compute_pace <= (time.monotonic() - began) / 12
    assert compute(manager, "second", held, 0.0) == 12
    assert manager.stats().outpaced == 0
    manager.shutdown()
