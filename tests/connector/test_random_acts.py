"""Random loads, stores, failures, resets and steps: never a wrong byte, never a place twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore.connector.backend import PinnedBackend
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.single_tier import PolicyManager
from kvstore.testing.manager import ManagerBench, keys_from, stored_in
from tests.store.support import small

BLOCKS, BYTES = 24, 4096

Transfer = tuple[list[bytes], list[int]]
"""Keys and places."""


def build(kind: str, policy: str, folder: Path) -> tuple[OffloadingManager, Any]:
    if kind == "backend":
        backend = PinnedBackend(16, BLOCKS, BYTES)
        return PolicyManager(backend, policy), backend.array
    disk = 192 if kind == "disk" else 0
    manager = KVStoreManager(small(folder, BLOCKS, disk, eviction_policy=policy, deadline_s=0.2))
    return manager, manager.region.array


class Acts:
    """A server that does anything at any time, and knows what must hold."""

    def __init__(self, bench: ManagerBench, chance: random.Random) -> None:
        self.bench = bench
        self.chance = chance
        self.loading: list[Transfer] = []
        self.storing: list[Transfer] = []
        self.done: Counter[str] = Counter()

    def prompt(self) -> list[bytes]:
        start = 100 * self.chance.randrange(6)
        return keys_from(start, self.chance.randint(1, 12))

    def one_of(self, transfers: list[Transfer]) -> Transfer:
        """Any that may end: of those with a key in common, the first."""
        chosen, _ = self.chance.choice(transfers)
        first = next(n for n, (keys, _) in enumerate(transfers) if {*keys} & {*chosen})
        return transfers.pop(first)

    def look_up_and_load(self) -> None:
        keys = self.prompt()
        found = self.bench.ask(keys)
        self.done["deferred"] += found is None
        if found and len(self.loading) < 3:
            keys = keys[:found]
            self.loading.append((keys, self.bench.begin_load(keys)))

    def end_load(self) -> None:
        if self.loading:
            keys, places = self.one_of(self.loading)
            for key, place in zip(keys, places, strict=True):
                assert self.bench.holds(place, key), f"{key.hex()} was rewritten"
            self.bench.end_load(self.chance.sample(keys, len(keys)))
            self.done["loaded"] += len(keys)

    def store(self) -> None:
        if len(self.storing) >= 2:
            return
        out = self.bench.begin_store(self.prompt())
        if out is not None and out.keys_to_store:
            places = stored_in(out)
            held = {place for _, its in [*self.loading, *self.storing] for place in its}
            assert not held & set(places), "a place that is in use was given out"
            self.storing.append((out.keys_to_store, places))

    def end_store(self) -> None:
        if self.storing:
            keys, places = self.one_of(self.storing)
            for key, place in zip(keys, places, strict=True):
                assert self.bench.holds(place, key), f"{key.hex()} was rewritten"
            ok = self.chance.random() < 0.9
            self.bench.end_store(self.chance.sample(keys, len(keys)), ok)
            self.done["stored"] += ok * len(keys)

    def reset(self) -> None:
        if self.chance.random() < 0.1:
            self.bench.manager.reset()
            self.done["resets"] += 1

    def run(self, count: int) -> None:
        acts = [
            (self.look_up_and_load, 6),
            (self.end_load, 4),
            (self.store, 4),
            (self.end_store, 3),
            (self.bench.end_step, 4),
            (self.reset, 1),
        ]
        for _ in range(count):
            (act,) = self.chance.choices([a for a, _ in acts], [w for _, w in acts])
            act()
        while self.loading:
            self.end_load()
        while self.storing:
            self.end_store()


@pytest.mark.parametrize("form", ["by lists", "by keys"])
@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density"])
@pytest.mark.parametrize("kind", ["backend", "host alone", "disk"])
def test_no_act_serves_a_wrong_byte_or_gives_a_place_twice(
    tmp_path: Path, kind: str, policy: str, form: str
) -> None:
    done: Counter[str] = Counter()
    for seed in range(3):
        manager, places = build(kind, policy, tmp_path / str(seed))
        bench = ManagerBench(manager, places, by_lists=form == "by lists")
        acts = Acts(bench, random.Random(seed))
        acts.run(1500)
        if isinstance(manager, KVStoreManager):
            stats = manager.stats()
            assert stats.illegal == 0
            assert stats.stray == 0
        manager.shutdown()
        done += acts.done
    assert done["loaded"] > 30
    assert done["stored"] > 30
    assert done["resets"] > 0
    assert kind != "disk" or done["deferred"]
