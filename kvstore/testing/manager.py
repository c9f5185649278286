"""The contract of `kvstore.connector.contract.OffloadingManager` as a test suite.

A manager's own tests inherit it and define how a manager is built:

    class TestMyManager(ManagerContract):
        def new_manager(self, folder):
            backend = MyBackend(16, self.blocks)
            return MyManager(backend), backend.array

Each test runs in both forms, by lists and by keys, unless `forms` names only one. The
suite needs pytest. It writes real bytes to the places that the manager names.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.connector.contract import OffloadingManager, PrepareStoreOutput, ReqContext
from kvstore.connector.mediums import BlockIDsLoadStoreSpec
from kvstore.testing.bench import key_of, payload_of

__all__ = ["ManagerBench", "ManagerContract", "keys_from", "stored_in"]

Places = npt.NDArray[np.uint8]

PATIENCE_SECONDS = 60.0
"""Seconds to wait for what must happen eventually, on any machine."""


class ManagerBench:
    """A manager and the memory that it manages, driven as a server drives it.

    Args:
        places: the memory, of shape (blocks, at least the bytes of a block).
        by_lists: whether to call by lists or by keys.
    """

    def __init__(self, manager: OffloadingManager, places: Places, *, by_lists: bool) -> None:
        self.manager = manager
        self.places = places
        self.by_lists = by_lists
        self._context = ReqContext("the request")
        if not by_lists:
            manager.on_new_request(self._context)

    @property
    def who(self) -> tuple[ReqContext, ...]:
        """Arguments that name the request, in this form."""
        return () if self.by_lists else (self._context,)

    def ask(self, keys: Sequence[bytes]) -> int | None:
        """Look up how many leading `keys` can be loaded, or None."""
        if self.by_lists:
            return self.manager.lookup(keys)
        for count, key in enumerate(keys):
            answer = self.manager.lookup(key, self._context)
            if not answer:
                return None if answer is None else count
        return len(keys)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Look up how many leading `keys` can be loaded, asking again until there is an answer."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (count := self.ask(keys)) is None:
            assert time.monotonic() < end, "deferred for ever"
            self.end_step()
            time.sleep(0.001)
        return count

    def begin_load(self, keys: Sequence[bytes]) -> list[int]:
        """Prepare a load; return the places."""
        spec = self.manager.prepare_load(keys, *self.who)
        return _places_of(spec, len(keys))

    def end_load(self, keys: Collection[bytes]) -> None:
        """Complete a load."""
        self.manager.complete_load(keys, *self.who)

    def load(self, keys: Sequence[bytes]) -> int:
        """Look up `keys`, load those found and check their bytes; return how many."""
        found = list(keys[: self.lookup(keys)])
        places = self.begin_load(found)
        for key, place in zip(found, places, strict=True):
            assert self.holds(place, key), f"wrong bytes for {key.hex()}"
        self.end_load(found)
        return len(found)

    def begin_store(self, keys: Iterable[bytes]) -> PrepareStoreOutput | None:
        """Prepare a store and write the payloads."""
        out = self.manager.prepare_store(keys, *self.who)
        if out is not None:
            places = stored_in(out)
            assert len(set(places)) == len(places), "one place for two keys"
            for key, place in zip(out.keys_to_store, places, strict=True):
                payload = np.frombuffer(payload_of(key, self.places.shape[1]), np.uint8)
                self.places[place] = payload
        return out

    def end_store(self, keys: Iterable[bytes], success: bool = True) -> None:
        """Complete a store."""
        if self.by_lists:
            self.manager.complete_store(keys, success)
        else:
            self.manager.complete_store(keys, self._context, success)

    def store(self, keys: Sequence[bytes]) -> list[bytes]:
        """Store the keys that are missing, offering them until accepted; return those stored."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (out := self.begin_store(keys)) is None:
            assert time.monotonic() < end, "refused for ever"
            self.end_step()
            time.sleep(0.001)
        self.end_store(out.keys_to_store)
        return out.keys_to_store

    def fill(self, blocks: int) -> None:
        """Store `blocks` new blocks at once, which only free places can take, and load them."""
        end = time.monotonic() + PATIENCE_SECONDS
        first = 1000
        while len(self.store(keys_from(first, blocks))) < blocks:
            assert time.monotonic() < end, "places are held for ever"
            self.end_step()
            time.sleep(0.001)
            first += blocks
        assert self.load(keys_from(first, blocks)) == blocks

    def touch(self, keys: Sequence[bytes]) -> None:
        self.manager.touch(keys, *self.who)

    def end_step(self) -> None:
        """End a step, if the form has steps."""
        if not self.by_lists:
            self.manager.on_schedule_end()

    def holds(self, place: int, key: bytes) -> bool:
        """Whether the place holds the payload of `key`."""
        return bytes(self.places[place]) == payload_of(key, self.places.shape[1])


def _places_of(spec: object, count: int) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    places: list[int] = spec.block_ids.tolist()
    assert len(places) == count
    return places


def stored_in(out: PrepareStoreOutput) -> list[int]:
    """Return the places of the keys to be stored."""
    return _places_of(out.store_spec, len(out.keys_to_store))


def keys_from(first: int, count: int) -> list[bytes]:
    """Return keys of one prompt."""
    return [key_of(number) for number in range(first, first + count)]


class ManagerContract(ABC):
    """Tests that every manager must pass, with `blocks` blocks of `block_bytes` bytes."""

    blocks = 16
    block_bytes = 4096
    forms: ClassVar[Sequence[str]] = ("by lists", "by keys")
    forgets = True
    """Whether evicted keys are lost; a manager with a slower tier keeps them."""

    @abstractmethod
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        """Create an empty manager of `blocks` blocks; return it and its memory."""

    @pytest.fixture
    def bench(self, tmp_path: Path, form: str) -> Iterator[ManagerBench]:
        manager, places = self.new_manager(tmp_path)
        yield ManagerBench(manager, places, by_lists=form == "by lists")
        manager.shutdown()

    @pytest.fixture(params=["by lists", "by keys"])
    def form(self, request: pytest.FixtureRequest) -> str:
        if request.param not in self.forms:
            pytest.skip(f"is not called {request.param}")
        return str(request.param)

    # -- lookups -----------------------------------------------------------------------

    def test_what_was_never_stored_is_not_there(self, bench: ManagerBench) -> None:
        assert bench.lookup(keys_from(0, 4)) == 0
        assert bench.lookup([]) == 0

    def test_what_was_stored_is_there_and_right(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 6)
        assert bench.store(keys) == keys
        assert bench.load(keys) == 6
        assert bench.load(keys[:3]) == 3

    def test_a_prefix_ends_at_the_first_gap(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 6)
        bench.store(keys[:2])
        bench.store(keys[3:])
        assert bench.load(keys) == 2

    def test_what_is_being_stored_cannot_be_loaded_yet(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 3)
        assert bench.begin_store(keys) is not None
        assert not bench.ask(keys)
        with pytest.raises(KeyError):
            bench.begin_load(keys)
        bench.end_store(keys)
        bench.end_step()
        assert bench.load(keys) == 3

    # -- stores ------------------------------------------------------------------------

    def test_what_is_there_is_not_stored_again(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 6)
        bench.store(keys[:4])
        assert bench.store(keys) == keys[4:]
        assert bench.store(keys) == []

    def test_a_key_that_is_named_twice_is_stored_once(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 3)
        assert bench.store([*keys, *keys]) == keys

    def test_a_store_of_nothing_is_a_store_of_nothing(self, bench: ManagerBench) -> None:
        out = bench.begin_store([])
        assert out is not None
        assert out.keys_to_store == []
        bench.end_store([])

    def test_a_store_that_failed_is_forgotten_and_can_be_tried_again(
        self, bench: ManagerBench
    ) -> None:
        keys = keys_from(0, 4)
        assert bench.begin_store(keys) is not None
        bench.end_store(keys, success=False)
        assert bench.lookup(keys) == 0
        assert bench.store(keys) == keys
        assert bench.load(keys) == 4

    def test_a_prompt_larger_than_the_medium_is_stored_as_far_as_it_fits(
        self, bench: ManagerBench
    ) -> None:
        keys = keys_from(0, self.blocks + 5)
        assert bench.store(keys) == keys[: self.blocks]
        assert bench.load(keys) == self.blocks

    def test_stores_under_way_share_no_place(self, bench: ManagerBench) -> None:
        first = bench.begin_store(keys_from(0, 5))
        second = bench.begin_store(keys_from(10, 5))
        assert first is not None
        assert second is not None
        assert not {*stored_in(first)} & {*stored_in(second)}
        bench.end_store(second.keys_to_store)
        bench.end_store(first.keys_to_store)
        assert bench.load(keys_from(0, 5)) == 5
        assert bench.load(keys_from(10, 5)) == 5

    def test_places_that_are_being_stored_are_not_given_out_again(
        self, bench: ManagerBench
    ) -> None:
        keys = keys_from(0, self.blocks)
        held = bench.begin_store(keys)
        assert held is not None
        out = bench.begin_store(keys_from(100, 4))
        assert out is None or not out.keys_to_store
        bench.end_store(held.keys_to_store)
        assert bench.load(keys) == self.blocks

    def test_keys_come_in_any_wrapping(self, bench: ManagerBench) -> None:
        manager, who = bench.manager, bench.who
        kinds: list[Callable[[Iterable[bytes]], Any]] = [iter, set, dict.fromkeys, tuple]
        for number, kind in enumerate(kinds):
            keys = keys_from(number, 1)
            for _ in range(2):
                out = bench.begin_store(kind(keys))
                assert out is not None
                bench.end_store(kind(out.keys_to_store))
            assert bench.load(keys) == 1
            spec = manager.prepare_load(kind(keys), *who)
            assert len(_places_of(spec, 1)) == 1
            manager.touch(kind(keys), *who)
            manager.complete_load(kind(keys), *who)
        for number in range(1, 4):
            bench.end_step()
            assert bench.store(keys_from(100 * number, self.blocks))

    # -- who leaves --------------------------------------------------------------------

    def test_stores_without_end_never_fail_for_want_of_room(self, bench: ManagerBench) -> None:
        for number in range(20):
            keys = keys_from(100 * number, 5)
            assert bench.store(keys), "everything stays, and nothing gets in"
            bench.end_step()
            assert bench.load(keys) <= 5

    def test_what_is_being_loaded_stays_until_it_was_loaded_as_often_as_prepared(
        self, bench: ManagerBench
    ) -> None:
        keys = keys_from(0, 4)
        bench.store(keys)
        assert bench.lookup(keys) == 4
        places = bench.begin_load(keys)
        assert bench.begin_load(keys) == places
        bench.end_load(keys)
        for number in range(1, 10):
            bench.store(keys_from(100 * number, 6))
            bench.end_step()
        assert all(bench.holds(place, key) for key, place in zip(keys, places, strict=True))
        assert bench.load(keys) == 4
        bench.end_load(keys)
        bench.fill(self.blocks)

    def test_a_load_that_cannot_be_prepared_holds_nothing(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 4)
        bench.store(keys)
        assert bench.lookup(keys) == 4
        with pytest.raises(KeyError):
            bench.begin_load([*keys, key_of(99)])
        bench.end_step()
        for number in range(1, 6):
            assert bench.store(keys_from(100 * number, self.blocks))
            bench.end_step()

    def test_strange_completions_change_nothing(self, bench: ManagerBench) -> None:
        keys = keys_from(0, 4)
        bench.end_load(keys)
        bench.end_store(keys)
        bench.store(keys)
        bench.end_load(keys)
        bench.end_store(keys, success=False)
        assert bench.load(keys) == 4

    def test_touching_what_is_not_there_does_nothing(self, bench: ManagerBench) -> None:
        bench.store(keys_from(0, 4))
        bench.touch(keys_from(2, 10))
        assert bench.load(keys_from(0, 4)) == 4

    # -- events and the end ------------------------------------------------------------

    def test_events_tell_what_is_there(self, bench: ManagerBench) -> None:
        there: set[tuple[str, bytes]] = set()
        for number in range(12):
            bench.store(keys_from(100 * number, 5))
            bench.end_step()
            for event in bench.manager.take_events():
                for key in event.keys:
                    place = (event.medium, key)
                    assert (place in there) == event.removed
                    there.discard(place) if event.removed else there.add(place)
        if self.forgets:
            assert len(there) <= self.blocks
        latest = keys_from(1100, 5)
        assert {key for _, key in there} & set(latest) == set(latest[: bench.lookup(latest)])

    def test_after_a_reset_nothing_is_there_and_what_was_under_way_ends(
        self, bench: ManagerBench
    ) -> None:
        keys, late = keys_from(0, 4), keys_from(10, 4)
        bench.store(keys)
        assert bench.lookup(keys) == 4
        places = bench.begin_load(keys)
        held = bench.begin_store(late)
        assert held is not None
        bench.manager.reset()
        bench.end_step()
        assert bench.lookup(keys) == 0
        assert not bench.ask(late)
        for number in range(1, 5):
            bench.store(keys_from(100 * number, 6))
        assert all(bench.holds(place, key) for key, place in zip(keys, places, strict=True))
        bench.end_load(keys)
        bench.end_store(held.keys_to_store)
        bench.end_step()
        assert bench.lookup(keys) == 0
        assert bench.lookup(late) == 0
        bench.fill(self.blocks)
