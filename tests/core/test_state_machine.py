"""The core against a reference that only knows what was stored, and where it cannot have left.

The reference is deliberately simple: sets of keys. A key that was never stored
whole is never a hit; a key that was, and that nothing can have displaced, is
never a miss.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.core import Core, OwnedTier
from kvstore.core.chunk import FILLING
from kvstore.core.residency.health import Health
from kvstore.types import Op
from tests.core.model import Client, World, chain

SECONDS = st.sampled_from((0.0, 0.001, 0.1, 1.0, 20.0))

NAMES = "abcdef"


class StoreAgainstSets(RuleBasedStateMachine):
    """Acts are those of `World`; what they may answer is said by sets of keys.

    Attributes:
        stored: keys whose store was completed, or which were found at a start.
        hosted: those whose store was completed since the last start.
        entered: keys that were ever given a row. While they are no more than
            there are rows, nothing has to leave host memory.
        leaving: keys whose removal is not over. erased: those that were erased on every
            tier, and not sent there again.
        written, sent: for each tier the keys whose copy was completed, and those
            whose copy was begun. While the latter are no more than there are
            slots, nothing has to leave the tier.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World(rows=1, tiers=0)
        self.stored: set[bytes] = set()
        self.hosted: set[bytes] = set()
        self.entered: set[bytes] = set()
        self.written: list[set[bytes]] = []
        self.sent: list[set[bytes]] = []
        self.cramped: set[int] = set()
        self.leaving: set[bytes] = set()
        self.erased: set[bytes] = set()
        self.unerased: set[bytes] = set()

    @initialize(
        rows=st.integers(1, 12),
        tiers=st.integers(0, 2),
        segment_slots=st.sampled_from((1, 4, 16)),
        segments=st.integers(1, 3),
        in_flight=st.integers(1, 12),
    )
    def begin(
        self, rows: int, tiers: int, segment_slots: int, segments: int, in_flight: int
    ) -> None:
        self.world = World(
            rows=rows,
            tiers=tiers,
            segment_slots=segment_slots,
            slots=segment_slots * segments,
            in_flight=in_flight,
        )
        self.written = [set() for _ in range(tiers)]
        self.sent = [set() for _ in range(tiers)]
        self.cramped = set()
        self.leaving, self.erased, self.unerased = set(), set(), set()

    # -- the reference -------------------------------------------------------------------

    def certainly_in_host(self, key: bytes) -> bool:
        return key in self.hosted and len(self.entered) <= len(self.world.rows)

    def certainly_fetchable(self, key: bytes) -> bool:
        for tier in self.world.core.tiers:
            index = tier.number
            if key in self.written[index] and not (
                key in self.leaving or self.displaced(index) or not tier.health.readable
            ):
                return True
        return False

    def note_stored(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if key not in self.world.core.hidden]
        self.stored.update(keys)
        self.hosted.update(keys)

    def note_moves(self) -> None:
        """What the core has asked of the engine."""
        orphans = self.world.core._transfers.orphans
        for move in self.world.moves:
            if move.op is Op.CASCADE:
                self.sent[move.tier].update(move.keys)
                self.erased.difference_update(move.keys)
            elif move.op is Op.PROMOTE and move.id not in orphans:
                assert self.written[move.tier] >= set(move.keys), "nobody wrote that"
                self.entered.update(move.keys)

    def note_removed(self) -> None:
        """Removals that are over: what they took is on no tier."""
        over = self.leaving - self.world.core.hidden.keys()
        self.leaving -= over
        self.erased |= over - self.unerased
        for written in self.written:
            written -= over

    # -- the server ----------------------------------------------------------------------

    def clients(self, *states: str) -> list[Client]:
        return [c for c in self.world.clients.values() if c.state in states and not c.gone]

    def pick(self, data: st.DataObject, *states: str) -> Client | None:
        found = self.clients(*states)
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: len(self.world.clients) < len(NAMES))
    @rule(prompt=st.sampled_from((0, 1, 32, 63)), length=st.integers(1, 14), data=st.data())
    def arrive(self, prompt: int, length: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in NAMES if n not in self.world.clients]))
        self.world.arrive(name, prompt, length)

    @precondition(lambda self: self.clients("asking"))
    @rule(data=st.data(), one_by_one=st.booleans(), load=st.booleans())
    def ask(self, data: st.DataObject, one_by_one: bool, load: bool) -> None:
        client = self.pick(data, "asking")
        assert client is not None
        self.ask_for(client, one_by_one, load)

    @precondition(lambda self: len(self.world.clients) < len(NAMES))
    @rule(prompt=st.sampled_from((0, 1, 32, 63)), length=st.integers(1, 14))
    def serve(self, prompt: int, length: int) -> None:
        """A whole request, with an engine that keeps up."""
        name = next(name for name in NAMES if name not in self.world.clients)
        client = self.world.arrive(name, prompt, length)
        for _ in range(20):
            self.ask_for(client, one_by_one=False, load=True)
            if client.state != "asking":
                break
            self.engine_works()
        if client.state == "loading":
            self.world.finish_load(client)
        for _ in range(3):
            if client.state == "computing":
                self.world.store(client)
                self.entered.update(client.stored)
                self.engine_works()
        if client.state == "storing":
            self.world.finish_store(client, ())
            self.note_stored(client.stored)
        self.world.leave(client)

    @rule(
        chunks=st.sampled_from((10, 10_000)),
        seconds=st.sampled_from((1.0, 1e3, 1e6)),
        goes_on=st.booleans(),
    )
    def server_tells_how_long_computing_takes(
        self, chunks: int, seconds: float, goes_on: bool
    ) -> None:
        self.world.core.computed(chunks, seconds)
        self.world.core.server_computes(goes_on, self.world.now)

    @rule()
    def engine_works(self) -> None:
        """Whatever is under way ends well."""
        for _ in range(4):
            self.step(0.001)
            while self.world.moves:
                self.end_move(0, set())

    def ask_for(self, client: Client, one_by_one: bool, load: bool) -> None:
        fresh = client.id not in self.world.core._requests
        answer = self.world.ask(client, one_by_one)
        if answer is None:
            assert any(key not in self.world.core._pool.chunks for key in client.keys) or any(
                chunk.state == FILLING for chunk in self.world.core._pool.chunks.values()
            ), "there was nothing to wait for"
            return
        assert self.stored >= set(client.keys[:answer]), "a hit that nobody stored"
        if answer < len(client.keys):
            end = client.keys[answer]
            assert not self.certainly_in_host(end), "a chunk in host memory was not found"
            assert not (fresh and self.certainly_fetchable(end)), "a chunk on a tier was not found"
        if load and answer:
            self.world.load(client, answer)
        elif load:
            client.state = "computing"

    @precondition(lambda self: self.clients("computing"))
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        client = self.pick(data, "computing")
        assert client is not None
        self.world.store(client)
        if client.state == "storing":
            self.entered.update(client.stored)

    @precondition(lambda self: self.clients("storing"))
    @rule(data=st.data(), fails=st.booleans())
    def finish_store(self, data: st.DataObject, fails: bool) -> None:
        client = self.pick(data, "storing")
        assert client is not None
        failed = data.draw(st.sets(st.sampled_from(client.stored))) if fails else set()
        self.world.finish_store(client, failed)
        self.note_stored([key for key in client.stored if key not in failed])

    @precondition(lambda self: self.clients("loading"))
    @rule(data=st.data())
    def finish_load(self, data: st.DataObject) -> None:
        client = self.pick(data, "loading")
        assert client is not None
        self.world.finish_load(client)

    @precondition(lambda self: self.clients("asking", "computing", "done"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.pick(data, "asking", "computing", "done")
        assert client is not None
        self.world.leave(client)

    # -- the engine and the clock ----------------------------------------------------------

    @rule(seconds=SECONDS)
    def step(self, seconds: float) -> None:
        self.world.step(seconds)
        self.note_removed()
        for tier in self.world.core.tiers:
            assert isinstance(tier, OwnedTier)
            if tier.slots.cannot_grow:
                self.cramped.add(tier.number)
        self.note_moves()

    @rule()
    def hand_over(self) -> None:
        self.world.hand_over()
        self.note_moves()

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data(), fails=st.booleans())
    def complete(self, data: st.DataObject, fails: bool) -> None:
        moves = self.world.moves
        move = moves[data.draw(st.integers(0, len(moves) - 1))]
        failures: set[int] = set()
        if fails:
            failures = data.draw(st.sets(st.integers(0, max(len(move.keys) - 1, 0)), min_size=1))
        self.end_move(moves.index(move), failures)

    def end_move(self, index: int, failures: set[int]) -> None:
        move = self.world.moves[index]
        current = move.id not in self.world.core._transfers.orphans
        self.world.complete(index, failures)
        ended = self.world.done[-1]
        if move.op is Op.CASCADE and not all(ended.ok):
            # A tier that failed is left alone for a while; nothing else is promised.
            self.sent[move.tier].update(move.keys)
        # The completion is taken in at once, so that the reference is not ahead of the core.
        self.world.take_in()
        self.note_removed()
        if move.op is Op.ERASE:
            failed = {key for key, good in zip(move.keys, ended.ok, strict=True) if not good}
            self.unerased |= failed
            self.erased -= failed
            return
        if not current:
            return
        written, entries = self.written[move.tier], self.world.core.tiers[move.tier].entries
        for place, (key, good) in enumerate(zip(move.keys, ended.ok, strict=True)):
            if move.op is Op.CASCADE and good:
                written.add(key)
            # What could not be read in passing is still there, until it has failed too often.
            there = good or (place in ended.unread and key in entries)
            if move.op is Op.PROMOTE and not there:
                written.discard(key)

    @rule(prompt=st.sampled_from((0, 1, 32, 63)), data=st.data())
    def remove(self, prompt: int, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(chain(prompt, 14)), min_size=1, max_size=6))
        core = self.world.core
        there = {
            key
            for key in {*keys} - core.hidden.keys()
            if (key in core._pool.chunks and core._pool.chunks[key].state != FILLING)
            or any(key in tier.entries for tier in core.tiers)
        }
        removal = self.world.remove(keys)
        assert removal.found == len(there)
        assert core.contains_prefix(keys) == 0
        self.leaving.update(keys)
        self.unerased.difference_update(keys)
        self.stored.difference_update(keys)
        self.hosted.difference_update(keys)

    @rule(
        prompt=st.sampled_from((0, 1, 32, 63)),
        length=st.integers(1, 14),
        seconds=SECONDS,
        host=st.booleans(),
    )
    def pin(self, prompt: int, length: int, seconds: float, host: bool) -> None:
        self.world.pin(chain(prompt, length), seconds, host=host)

    @rule(prompt=st.sampled_from((0, 1, 32, 63)), length=st.integers(1, 14))
    def unpin(self, prompt: int, length: int) -> None:
        self.world.core._pins.end(chain(prompt, length))

    @rule(prompt=st.sampled_from((0, 1, 32, 63)), length=st.integers(1, 14))
    def prefetch(self, prompt: int, length: int) -> None:
        self.world.prefetch(chain(prompt, length))

    @rule(prompt=st.sampled_from((0, 1, 32, 63)), length=st.integers(1, 14))
    def demote(self, prompt: int, length: int) -> None:
        keys = chain(prompt, length)
        self.world.demote(keys)
        # They may leave although there is room, once a tier has them.
        self.hosted.difference_update(keys)

    @rule()
    def reset(self) -> None:
        self.world.reset()
        self.stored.clear()
        self.hosted.clear()
        self.leaving.clear()
        self.erased.clear()
        # Rows of copies that go on are missing until those have ended.
        late = {row for copy in self.world.late for row in copy.rows}
        self.entered = {b"late-%d" % row for row in late}
        # Slots of copies that are still under way are not free yet; count them in.
        self.sent = [set() for _ in self.sent]
        self.written = [set() for _ in self.written]

    @precondition(lambda self: self.world.late)
    @rule(data=st.data(), moment=st.booleans())
    def land(self, data: st.DataObject, moment: bool) -> None:
        self.world.land(data.draw(st.sampled_from(self.world.late)), moment=moment)

    @rule()
    def restart(self) -> None:
        world = self.world
        clearing = [tier.clearing for tier in world.core.tiers]
        world.restart()
        self.stored.clear()
        self.hosted.clear()
        self.entered.clear()
        for tier, was_clearing in zip(world.core.tiers, clearing, strict=True):
            found = set(tier.entries)
            assert not found & self.erased, "what was removed is there again"
            # Those that were on their way out may be gone, or not.
            self.written[tier.number] -= self.leaving - found
            if was_clearing:
                # Killed before the tier had forgotten: what it held is there once more.
                self.written[tier.number] = found
                self.sent[tier.number] = set(found)
            assert found >= self.written[tier.number] or self.displaced(tier.number)
            self.written[tier.number] = found
            self.sent[tier.number] |= found
            self.stored |= found
        self.leaving.clear()

    def displaced(self, index: int) -> bool:
        """Whether chunks may have made room for others: all did not fit, or growth took long."""
        return index in self.cramped or len(self.sent[index]) > len(self.world.slots[index])

    # -- always ----------------------------------------------------------------------------

    @invariant()
    def world_is_sound(self) -> None:
        self.world.check()

    @invariant()
    def events_tell_what_is_there(self) -> None:
        self.world.check_events()

    @invariant()
    def tiers_hold_only_what_was_written(self) -> None:
        for tier in self.world.core.tiers:
            assert set(tier.entries) <= self.written[tier.number]

    def teardown(self) -> None:
        self.world.settle()


StoreAgainstSets.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStoreAgainstSets = StoreAgainstSets.TestCase


# -- the machine can fail ------------------------------------------------------------------


def run_until_it_fails() -> None:
    once = settings(
        StoreAgainstSets.TestCase.settings,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(StoreAgainstSets, settings=once)


def test_the_machine_notices_a_chunk_that_left_for_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poll = Core.poll

    def wasteful(self: Core, *args: Any) -> None:
        poll(self, *args)
        self._pool.leave(self._victims.choose(1, shed_unsaved=True))

    monkeypatch.setattr(Core, "poll", wasteful)
    with pytest.raises(AssertionError, match="a chunk in host memory was not found"):
        run_until_it_fails()


def test_the_machine_notices_a_tier_that_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Health, "readable", never, raising=False)
    monkeypatch.setattr(
        StoreAgainstSets,
        "certainly_fetchable",
        lambda self, key: any(key in written for written in self.written),
    )
    with pytest.raises(AssertionError, match="a chunk on a tier was not found"):
        run_until_it_fails()
