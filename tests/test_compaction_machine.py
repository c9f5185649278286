"""Offline compaction at any moment of a cache's life: what was found before is found after.

Servers are real processes over real files: two lanes of one namespace that start, store, remove,
are reset, stop and are killed, with `kvstore.maintenance.offline.compact` in between, which is
killed now and then, too.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import kvstore
from kvstore.maintenance.offline import compact
from tests.patience import PATIENCE

CHUNK = 4096
SLOTS = 8
SEGMENT = 64 * 1024
NUMBERS = range(40)
LANES = (0, 1)

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["kvstore", "kvstore.maintenance.offline", "tests.test_compaction_machine"]
)


def key_of(lane: int, number: int) -> bytes:
    return b"lane-%d-%03d" % (lane, number) + b"\0\0\0\0"


def payload_of(key: bytes, version: int) -> bytes:
    return random.Random(b"%d" % version + key).randbytes(CHUNK)


def config_of(path: str, lane: int) -> dict[str, Any]:
    tier = {
        "type": "disk",
        "path": path,
        "capacity_bytes": "16MiB",
        "segment_bytes": SEGMENT,
        "lane": lane,
    }
    return {
        "cpu_bytes_to_use": 64 * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": {"model": "machine"},
        "deadline_s": PATIENCE,
        "max_wait_s": PATIENCE,
        "recompute_s": 0,
        "keep_events": True,
        "tiers": [tier],
    }


def serve(path: str, lane: int, pipe: Connection) -> None:
    """A server that does what it is told over `pipe`, until it is told to stop."""
    with kvstore.open_sync(config_of(path, lane)) as store:
        pipe.send("open")
        while (told := pipe.recv()) is not None:
            what, argument = told
            answer: Any = None
            if what == "put":
                keys = [key for key, _ in argument]
                assert store.put(keys, [payload_of(*one) for one in argument]) == len(keys)
                assert store.flush(PATIENCE)
                assert store.stats().tiers[0].failed_writes == 0
            elif what == "remove":
                store.remove(argument)
            elif what == "reset":
                store.reset(PATIENCE)
            elif what == "get":
                answer = {}
                for key in argument:
                    with store.get([key]) as chunks:
                        for chunk in chunks:
                            answer[key] = bytes(chunk)
            pipe.send(answer)


def tidy(path: str, pipe: Connection) -> None:
    """Compact what nobody owns; tells what was dropped, and what went wrong."""
    pipe.send("begin")
    done = compact(path)
    dropped = sum(one.result.dropped for one in done if one.result)
    pipe.send((dropped, [one.failed for one in done if one.failed]))


class Process:
    """A process of one of the functions above."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = _FORKS.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE), "the process says nothing"
        return self.pipe.recv()

    def ask(self, what: str, argument: Any = None) -> Any:
        self.pipe.send((what, argument))
        return self.hear()

    def stop(self) -> None:
        self.pipe.send(None)
        self._process.join(PATIENCE)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)


class Compactions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp()
        self.servers: dict[int, Process] = {}
        self.versions: dict[bytes, int] = {}
        """What each key was last stored with."""
        self.kept: dict[int, set[bytes]] = {lane: set() for lane in LANES}
        """What must be found in a lane."""
        self.perhaps: set[bytes] = set()
        """What may be found: it was stored when its process was killed, or another's reset came."""

    def teardown(self) -> None:
        for server in self.servers.values():
            server.kill()
        shutil.rmtree(self.path)

    def started(self, lane: int) -> Process:
        if lane not in self.servers:
            self.servers[lane] = Process(serve, self.path, lane)
        return self.servers[lane]

    @rule(lane=st.sampled_from(LANES), numbers=st.sets(st.sampled_from(NUMBERS), min_size=1))
    def put(self, lane: int, numbers: set[int]) -> None:
        keys = [key_of(lane, number) for number in sorted(numbers)]
        server = self.started(lane)
        for key in keys:
            if key not in self.kept[lane] | self.perhaps:
                self.versions[key] = self.versions.get(key, 0) + 1
        server.ask("put", [(key, self.versions[key]) for key in keys])
        self.kept[lane] |= set(keys)
        self.perhaps -= set(keys)

    @initialize(lane=st.sampled_from(LANES), reset=st.booleans())
    def begin_sparse(self, lane: int, reset: bool) -> None:
        """A lane of several segments with holes, before or after a reset."""
        if reset:
            self.reset(lane)
        self.put(lane, set(NUMBERS))
        self.remove(lane, 0.66, 5)

    @rule(lane=st.sampled_from(LANES), share=st.floats(0.1, 0.9), seed=st.integers(0, 99))
    def remove(self, lane: int, share: float, seed: int) -> None:
        held = sorted(self.kept[lane])
        keys = random.Random(seed).sample(held, int(share * len(held)))
        if keys:
            self.started(lane).ask("remove", keys)
            self.kept[lane] -= set(keys)

    @rule(lane=st.sampled_from(LANES))
    def reset(self, lane: int) -> None:
        self.started(lane).ask("reset")
        self.kept[lane] = set()
        self.perhaps -= {key_of(lane, number) for number in NUMBERS}
        for other in set(LANES) - {lane}:
            # The others' chunks are of an older epoch: theirs until they end.
            self.perhaps |= self.kept[other]
            self.kept[other] = set()
            if other not in self.servers:
                self.perhaps -= {key_of(other, number) for number in NUMBERS}
            else:
                self.stop(other)

    @rule(lane=st.sampled_from(LANES))
    def stop(self, lane: int) -> None:
        if lane in self.servers:
            self.servers.pop(lane).stop()

    @rule(lane=st.sampled_from(LANES))
    def kill(self, lane: int) -> None:
        if lane in self.servers:
            self.servers.pop(lane).kill()

    @precondition(lambda self: any(Path(self.path).iterdir()))
    @rule(lanes=st.sets(st.sampled_from(LANES)), kill_after=st.none() | st.floats(0, 0.02))
    def compact(self, lanes: set[int], kill_after: float | None) -> None:
        """Stop or leave running what serves, and compact the rest."""
        for lane in lanes:
            self.stop(lane)
        process = Process(tidy, self.path)
        if kill_after is None:
            assert process.hear() == (0, [])
        else:
            time.sleep(kill_after)
        process.kill()

    @rule(lane=st.sampled_from(LANES))
    def look(self, lane: int) -> None:
        self.check(lane, range(len(NUMBERS)))

    @precondition(lambda self: self.kept[0] or self.kept[1])
    @invariant()
    def within_reason(self) -> None:
        assert sum(1 for _ in Path(self.path).rglob("segment-*")) <= 2 * 16 * 2**20 // SEGMENT

    def check(self, lane: int, numbers: Sequence[int]) -> None:
        keys = [key_of(lane, number) for number in numbers]
        found = self.started(lane).ask("get", keys)
        assert self.kept[lane] <= found.keys() <= self.kept[lane] | self.perhaps
        for key, payload in found.items():
            assert payload == payload_of(key, self.versions[key]), key


class FromTheEnd(Compactions):
    """The same; whatever was done, all is looked at in new processes at the end."""

    def teardown(self) -> None:
        try:
            for lane in LANES:
                self.stop(lane)
            if any(Path(self.path).iterdir()):
                for lane in LANES:
                    self.check(lane, NUMBERS)
                    self.stop(lane)
                self.compact(set(LANES), None)
                for lane in LANES:
                    self.check(lane, NUMBERS)
        finally:
            super().teardown()


TestCompactions = FromTheEnd.TestCase
TestCompactions.settings = settings(
    max_examples=int(os.environ.get("KVSTORE_COMPACTIONS", "8")),
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target),
)
