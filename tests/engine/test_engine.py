"""The engine runs moves, in order, and hands every one of them back, whatever a tier does."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import concurrency
from kvstore.concurrency import new_event_loop
from kvstore.engine import engine as engine_module
from kvstore.engine.engine import Engine, EngineThread, end_engine
from kvstore.errors import KVStoreError
from kvstore.tiers import PinnedRegion, Tier, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.namespace import Namespace
from kvstore.types import NO_MOVE, Changes, Completion, Move, Op
from tests.engine.fakes import GatedTier, RaisingTier, SilentTier
from tests.patience import PATIENCE, until

ROWS, ROW_BYTES = 16, 4096

Batches = Sequence[Sequence[Move]]


def key(number: int) -> bytes:
    return b"key-%04d" % number + b"\0\0\0\0"


def read(id: int, slot: int = 0) -> Move:
    return Move(id, Op.PROMOTE, 0, [key(id)], [0], [slot])


def write(id: int, slot: int = 0) -> Move:
    return Move(id, Op.CASCADE, 0, [key(id)], [0], [slot])


ALL_OPS = [read(0), write(1), Move(2, Op.GROW, 0), Move(3, Op.CLEAR, 0)]


def take(engine: EngineThread, count: int) -> list[Completion]:
    """The next `count` completions, by move."""
    taken: list[Completion] = []
    while len(taken) < count:
        assert engine.wait(PATIENCE), f"only {len(taken)} of {count} moves ended"
        taken += engine.take()
    return sorted(taken, key=lambda completion: completion.move_id)


@pytest.fixture
def threads() -> Iterator[Callable[[Tier], EngineThread]]:
    """Makes engines on threads of their own, and closes them."""
    engines: list[EngineThread] = []

    def start(*tiers: Tier) -> EngineThread:
        engines.append(EngineThread(tiers))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close([[] for _ in engine._engine._tiers], 0.05)


Start = Callable[..., EngineThread]


# -- one engine, two loops -----------------------------------------------------------------


def batches() -> Batches:
    """Stores, loads, a wrong key, growth, forgetting: one batch after the other."""
    keys, rows = [key(n) for n in range(6)], list(range(6))
    wrong = [keys[0], b"another\0\0\0\0", keys[2]]
    return [
        [Move(0, Op.CASCADE, 0, keys[:4], rows[:4], [0, 1, 2, 3]), Move(1, Op.GROW, 0)],
        [Move(2, Op.CASCADE, 0, keys[4:], rows[4:], [4, 9])],
        [Move(3, Op.PROMOTE, 0, keys, [8, 9, 10, 11, 12, 13], [0, 1, 2, 3, 4, 9])],
        [Move(4, Op.PROMOTE, 0, wrong, [6, 7, 14], [0, 1, 2])],
        [Move(5, Op.GROW, 0), Move(6, Op.CLEAR, 0)],
        [Move(7, Op.PROMOTE, 0, keys[:2], [6, 7], [0, 1])],
    ]


def disk_and_region(folder: Path) -> tuple[DiskTier, PinnedRegion]:
    region = PinnedRegion.private(ROWS, ROW_BYTES)
    for row in range(8):
        region.row(row)[:] = bytes([row + 1]) * ROW_BYTES
    segment_bytes = 64 * 1024
    tier = DiskTier(
        folder,
        Namespace.of("engine", {"test": True}),
        ROW_BYTES,
        2 * segment_bytes,
        segment_bytes=segment_bytes,
    )
    tier.open(region)
    return tier, region


Outcome = tuple[list[tuple[int, list[bool], list[int], bool]], bytes]


def outcome(done: Sequence[Completion], region: PinnedRegion) -> Outcome:
    ended = sorted(done, key=lambda completion: completion.move_id)
    told = [(c.move_id, c.ok, c.segments, c.error is None) for c in ended]
    return told, bytes(region.view[: ROWS * ROW_BYTES])


async def on_this_loop(folder: Path) -> Outcome:
    tier, region = disk_and_region(folder)
    arrived = asyncio.Event()
    engine = Engine([tier], arrived.set)
    done: list[Completion] = []
    for batch in batches():
        engine.start(batch)
        expected = len(done) + len(batch)
        while len(done) < expected:
            await asyncio.wait_for(arrived.wait(), PATIENCE)
            arrived.clear()
            done += engine.take()
    await engine.close([[]])
    return outcome(done, region)


def on_a_thread(folder: Path) -> Outcome:
    tier, region = disk_and_region(folder)
    engine = EngineThread([tier])
    done: list[Completion] = []
    for batch in batches():
        engine.submit(batch)
        done += take(engine, len(batch))
    assert engine.close([[]])
    return outcome(done, region)


def test_the_same_moves_end_the_same_on_the_callers_loop_and_on_a_thread(tmp_path: Path) -> None:
    told, memory = on_a_thread(tmp_path / "thread")
    assert told == [
        (0, [True] * 4, [], True),
        (1, [], [1], True),
        (2, [True] * 2, [], True),
        (3, [True] * 6, [], True),
        (4, [True, False, True], [], False),
        (5, [], [], True),
        (6, [], [0, 1], True),
        (7, [False] * 2, [], False),
    ]
    for row in range(6):
        assert memory[(8 + row) * ROW_BYTES :][:ROW_BYTES] == bytes([row + 1]) * ROW_BYTES
    assert asyncio.run(on_this_loop(tmp_path / "asyncio")) == (told, memory)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(on_this_loop(tmp_path / "best")) == (told, memory)


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    assert type(loop).__module__.startswith("asyncio")
    loop.close()


# -- moves ---------------------------------------------------------------------------------


def test_moves_begin_in_the_order_in_which_they_were_given(threads: Start) -> None:
    tier = GatedTier(opened=True)
    engine = threads(tier)
    engine.submit([write(id, slot=id) for id in range(20)])
    engine.submit([read(id, slot=id) for id in range(20, 40)])
    assert [completion.move_id for completion in take(engine, 40)] == list(range(40))
    assert tier.calls == [f"write {n}" for n in range(20)] + [f"read {n}" for n in range(20, 40)]


def test_a_move_that_waits_holds_up_no_other(threads: Start) -> None:
    class OneSlow(GatedTier):
        async def _pass(self, call: str) -> None:
            if call == "read 0":
                await super()._pass(call)

    tier = OneSlow()
    engine = threads(tier)
    engine.submit([read(0), read(1, slot=1)])
    (first,) = take(engine, 1)
    assert first.move_id == 1
    engine._loop.call_soon_threadsafe(tier.gate.set)
    (second,) = take(engine, 1)
    assert second.move_id == 0


def test_every_completion_is_taken_once(threads: Start) -> None:
    engine = threads(GatedTier(opened=True))
    engine.submit([read(id) for id in range(10)])
    assert len(take(engine, 10)) == 10
    assert engine.take() == []


def test_waiting_for_a_completion_is_bounded(threads: Start) -> None:
    engine = threads(GatedTier())
    engine.submit([read(0)])
    start = time.monotonic()
    assert not engine.wait(0.05)
    assert 0.04 < time.monotonic() - start < PATIENCE


def test_nothing_to_do_wakes_nobody(threads: Start) -> None:
    engine = threads(GatedTier())
    engine.submit([])
    assert not engine.wait(0.02)


def test_a_tier_that_raises_ends_its_moves_as_failed(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = threads(RaisingTier())
    with caplog.at_level(logging.CRITICAL):
        engine.submit(ALL_OPS)
        done = take(engine, 4)
    assert [completion.ok for completion in done] == [[False], [False], [], []]
    assert [completion.segments for completion in done] == [[]] * 4
    assert all("today" in (completion.error or "") for completion in done)


def test_what_the_system_says_is_no_fault_of_a_tier_and_has_no_traceback(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(GatedTier):
        async def _pass(self, call: str) -> None:
            raise OSError(errno.EIO, "Input/output error", "/cache/lane-0")

    engine = threads(Refused())
    engine.submit(ALL_OPS)
    done = take(engine, 4)
    assert [completion.ok for completion in done] == [[False], [False], [], []]
    assert all("Input/output error: '/cache/lane-0'" in (each.error or "") for each in done)
    assert any("Input/output error" in record.getMessage() for record in caplog.records)
    assert not any(record.exc_info for record in caplog.records)


def test_faults_are_told_of_each_tier_by_its_name(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(GatedTier):
        name = "disk:/a,/b"

        async def _pass(self, call: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

    engine = threads(Refused(), Refused(), GatedTier(opened=True))
    moves = [Move(n, Op.PROMOTE, n, [key(n)], [0], [0]) for n in range(3)]
    engine.submit(moves)
    assert [move.ok for move in take(engine, 3)] == [[False], [False], [True]]
    told = [record.getMessage().split(": [Errno")[0] for record in caplog.records]
    assert sorted(told) == ["promote, disk:/a,/b", "promote, disk:/a,/b (1)"]


class Panic(BaseException):
    """What a client that is not written in Python may raise."""


def test_a_panic_of_a_native_client_ends_its_move_as_failed(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Panicking(GatedTier):
        async def _pass(self, call: str) -> None:
            raise Panic(call)

    engine = threads(Panicking())
    with caplog.at_level(logging.CRITICAL):
        engine.submit(ALL_OPS)
        done = take(engine, 4)
    assert [completion.ok for completion in done] == [[False], [False], [], []]
    assert all("Panic" in (completion.error or "") for completion in done)


async def test_a_tier_that_raises_does_not_raise_on_the_callers_loop() -> None:
    engine = Engine([RaisingTier()], lambda: None)
    engine.start(ALL_OPS)
    await engine.close([[]])
    assert sorted(completion.move_id for completion in engine.take()) == [0, 1, 2, 3]


@pytest.mark.parametrize("flags", [[], [True], [True] * 3])
def test_a_tier_that_answers_for_other_blocks_than_it_was_asked_is_not_believed(
    threads: Start, flags: list[bool]
) -> None:
    class Confused(GatedTier):
        async def read(
            self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
        ) -> Transfer:
            return Transfer(flags)

    engine = threads(Confused())
    engine.submit([Move(0, Op.PROMOTE, 0, [key(0), key(1)], [0, 1], [0, 1])])
    (completion,) = take(engine, 1)
    assert completion.ok == [False, False]
    assert completion.error is not None


@pytest.mark.parametrize(
    ("done", "unread"),
    [
        (Transfer((True, False), "gone", unread=None), []),  # type: ignore[arg-type]
        (Transfer(np.array([True, False]), "gone", unread=np.array([1])), [1]),  # type: ignore[arg-type]
        (Transfer([True, False], OSError("gone"), unread={1}), [1]),  # type: ignore[arg-type]
    ],
)
def test_answers_in_other_types_are_taken_for_what_they_mean(
    threads: Start, done: Transfer, unread: list[int]
) -> None:
    class Numeric(GatedTier):
        async def read(
            self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
        ) -> Transfer:
            return done

        async def grow(self) -> tuple[int | None, str | None]:
            return np.int64(1), None  # type: ignore[return-value]

    engine = threads(Numeric())
    engine.submit([Move(0, Op.PROMOTE, 0, [key(0), key(1)], [0, 1], [0, 1]), Move(1, Op.GROW, 0)])
    completion, grown = sorted(take(engine, 2), key=lambda each: each.move_id)
    assert completion.ok == [True, False]
    assert completion.unread == unread
    assert completion.error == "gone"
    assert [type(segment) for segment in grown.segments] == [int]


@pytest.mark.parametrize("unread", [[2], [-1], ["a"]])
def test_places_that_no_key_has_are_not_believed(threads: Start, unread: list[Any]) -> None:
    class Confused(GatedTier):
        async def read(
            self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
        ) -> Transfer:
            return Transfer([False] * 2, "gone", unread=unread)

    engine = threads(Confused())
    engine.submit([Move(0, Op.PROMOTE, 0, [key(0), key(1)], [0, 1], [0, 1])])
    (completion,) = take(engine, 1)
    assert completion.ok == [False, False]
    assert list(completion.unread) == [0, 1]


def test_a_move_ends_although_its_tier_cannot_say_what_it_is(threads: Start) -> None:
    class Nameless(RaisingTier):
        @property
        def description(self) -> str:
            raise RuntimeError("no name today")

    engine = threads(Nameless())
    engine.submit(ALL_OPS)
    assert [completion.ok for completion in take(engine, 4)] == [[False], [False], [], []]


# -- tiers that others write to --------------------------------------------------------------


class Neighbour(GatedTier):
    is_peer = refreshes = True

    def __init__(self) -> None:
        super().__init__(opened=True)
        self.looks = 0

    async def refresh(self) -> Changes:
        self.looks += 1
        return Changes([(key(self.looks), self.looks)]) if self.looks % 2 else Changes()


def test_what_others_write_comes_as_completions_of_no_move(
    threads: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FOLLOW_SECONDS", 0.001)
    engine = threads(GatedTier(), Neighbour())
    news = take(engine, 2)
    assert [(c.move_id, c.tier, c.changes) for c in news[:2]] == [
        (NO_MOVE, 1, Changes([(key(1), 1)])),
        (NO_MOVE, 1, Changes([(key(3), 3)])),
    ]


def test_a_tier_that_cannot_be_followed_is_used_all_the_same(
    threads: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "FOLLOW_SECONDS", 0.001)

    class Deaf(Neighbour):
        async def refresh(self) -> Changes:
            self.looks += 1
            raise OSError("gone")

    tier = Deaf()
    engine = threads(tier)
    until(lambda: tier.looks > 9)
    engine.submit([read(0)])
    (completion,) = take(engine, 1)
    assert completion.ok == [True]
    told = [r for r in caplog.records if "cannot learn what has changed in gated" in r.getMessage()]
    assert len(told) == 1


def test_looks_that_fail_in_passing_do_not_end_the_following(
    threads: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FOLLOW_SECONDS", 0.001)

    class Deaf(Neighbour):
        async def refresh(self) -> Changes:
            if self.looks < 3:
                self.looks += 1
                raise OSError("gone")
            return await super().refresh()

    engine = threads(GatedTier(), Deaf())
    (found,) = take(engine, 1)[:1]
    assert found.changes == Changes([(key(5), 5)])


# -- the end ---------------------------------------------------------------------------------


def test_closing_waits_for_what_is_under_way(threads: Start) -> None:
    tier = GatedTier()
    engine = threads(tier)
    engine.submit([write(id, slot=id) for id in range(3)])
    until(lambda: tier.running == 3)
    timer = threading.Timer(0.1, lambda: engine._loop.call_soon_threadsafe(tier.gate.set))
    timer.start()
    assert engine.close([[]], PATIENCE)
    assert tier.closed_with == 0, "the tier is closed last"
    assert [completion.ok for completion in engine.take()] == [[True]] * 3


def test_closing_takes_in_what_was_submitted_just_before(threads: Start) -> None:
    engine = threads(GatedTier(opened=True))
    engine.submit([write(0)])
    assert engine.close([[]], PATIENCE)
    assert [completion.move_id for completion in engine.take()] == [0]


def test_the_tiers_are_told_the_order_of_their_chunks(threads: Start) -> None:
    told: list[object] = []

    class Listening(GatedTier):
        async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
            told.append(coldest_first)

    engine = threads(Listening(), Listening())
    assert engine.close([[(b"a", 1)], [(b"b", 2)]])
    assert told == [[(b"a", 1)], [(b"b", 2)]]


def test_after_the_end_nothing_is_taken_on_and_no_thread_is_left(threads: Start) -> None:
    engine = threads(GatedTier())
    assert engine.close([[]])
    assert engine.close([[]]), "closing twice is harmless"
    with pytest.raises(KVStoreError, match="closed"):
        engine.submit([read(0)])
    assert not engine._thread.running
    assert engine._loop.is_closed()


def test_a_tier_that_never_answers_does_not_keep_the_engine_from_closing(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = threads(SilentTier())
    engine.submit([read(0)])
    start = time.monotonic()
    assert not engine.close([[]], 0.1)
    assert time.monotonic() - start < PATIENCE
    assert "left behind" in caplog.text


def test_a_tier_that_cannot_be_closed_does_not_keep_others_from_it(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    other = GatedTier()
    engine = threads(RaisingTier(), other)
    assert engine.close([[], []])
    assert other.closed_with == 0
    assert "no close today" in caplog.text


def run_python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_exits_in_peace_while_a_tier_does_not_answer(closes: bool) -> None:
    ended = run_python(
        """
        import sys
        from kvstore.engine.engine import EngineThread
        from tests.engine.fakes import SilentTier
        from tests.engine.test_engine import read
        from tests.patience import until

        tier = SilentTier()
        engine = EngineThread([tier])
        engine.submit([read(0)])
        until(lambda: tier.running)
        if sys.argv[1] == "True":
            print(engine.close([[]], 0.1))
        print("done")
        """,
        str(closes),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == (["False", "done"] if closes else ["done"])
    # asyncio's debug mode tells calls of a tenth of a second, which a busy machine makes of any.
    told = ("left behind", "Executing <")
    noise = [line for line in ended.stderr.splitlines() if not any(one in line for one in told)]
    assert noise == []


def in_a_child(act: Callable[[], None]) -> str:
    """Fork, do `act` in the child; returns what it raised in words, "" if nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ""
        try:
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_cannot_use_the_engine_and_is_told_whose_it_is(threads: Start) -> None:
    engine = threads(GatedTier(opened=True))
    owner = f"KVStoreError: this engine belongs to process {os.getpid()}"
    assert in_a_child(lambda: engine.submit([read(0)])) == owner
    assert in_a_child(lambda: engine.submit([])) == owner


def test_a_forked_child_may_end_without_harm_to_the_engine(threads: Start) -> None:
    tier = GatedTier(opened=True)
    engine = threads(tier)

    def close() -> None:
        assert engine.close([[]], PATIENCE)

    assert in_a_child(close) == ""
    engine.submit([read(7)])
    assert [completion.move_id for completion in take(engine, 1)] == [7]


async def test_a_forked_child_cannot_use_an_engine_on_a_loop() -> None:
    engine = Engine([GatedTier(opened=True)], lambda: None)
    said = in_a_child(lambda: engine.start([read(0)]))
    assert said == f"KVStoreError: this engine belongs to process {os.getpid()}"


class Companion:
    """Counts until it is stopped, or fails at once."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.told: list[str] = []
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        self.told.append("runs")
        if self.fails:
            raise OSError("no space left")
        await self._stopped.wait()
        self.told.append("ended")

    def stop(self) -> None:
        self.told.append("stopped")
        self._stopped.set()


@pytest.mark.parametrize("fails", [False, True], ids=["in peace", "failing"])
def test_what_runs_beside_it_ends_with_it_and_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    companion, tier = Companion(fails), GatedTier(opened=True)
    engine = EngineThread([tier], [companion])
    engine.submit([read(3)])
    assert [completion.move_id for completion in take(engine, 1)] == [3]
    assert engine.close([[]], PATIENCE)
    assert companion.told == ["runs", "stopped"] + ["ended"] * (not fails)
    assert ("no space left" in caplog.text) == fails


def test_an_engine_without_a_thread_leaves_no_loop_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    def watched() -> asyncio.AbstractEventLoop:
        loops.append(new_event_loop())
        return loops[-1]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(concurrency, "new_event_loop", watched)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(KVStoreError, match="start new thread"):
        EngineThread([])
    assert [loop.is_closed() for loop in loops] == [True]


# -- one tier among others -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in a move", "in its close"])
def test_a_tier_that_does_not_answer_keeps_no_other_one_open(threads: Start, where: str) -> None:
    silent = GatedTier() if where == "in a move" else SilentTier()
    healthy = GatedTier(opened=True)
    engine = threads(silent, healthy)
    if where == "in a move":
        engine.submit([read(0)])
    assert not engine.close([[], []], 0.5)
    assert healthy.closed_with == 0


async def test_so_it_is_on_a_loop_of_the_server() -> None:
    silent, healthy = SilentTier(), GatedTier(opened=True)
    engine = Engine([silent, healthy], lambda: None)
    assert not await end_engine(engine, [[], []], 0.2)
    assert healthy.closed_with == 0


class PeerTier(GatedTier):
    is_peer = True


def test_peers_keep_open_only_the_tier_beside_which_they_lie(threads: Start) -> None:
    disk, peer, other = GatedTier(opened=True), PeerTier(), GatedTier(opened=True)
    engine = threads(disk, peer, other)
    engine.submit([Move(0, Op.PROMOTE, 1, [key(0)], [0], [0])])
    assert until(lambda: peer.running)
    assert not engine.close([[], [], []], 0.3)
    assert (disk.closed_with, peer.closed_with, other.closed_with) == (None, None, 0)


class BadTier(GatedTier):
    """Raises what ends a task, or is no `Exception`, from everything."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(opened=True)
        self.error = error

    async def _pass(self, call: str) -> None:
        raise self.error

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        raise self.error


class PanicError(BaseException):
    """As a native client raises it."""


@pytest.mark.parametrize("error", [asyncio.CancelledError(), PanicError("panic")])
def test_a_move_ends_whatever_its_tier_raises(threads: Start, error: BaseException) -> None:
    engine = threads(BadTier(error))
    engine.submit([read(0), write(1)])
    assert [(done.ok, done.error is None) for done in take(engine, 2)] == [([False], False)] * 2
    assert not engine._engine.cut_off


def test_a_panic_at_the_end_keeps_no_other_tier_open(
    threads: Start, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = GatedTier(opened=True)
    assert threads(BadTier(PanicError("panic")), healthy).close([[], []], PATIENCE)
    assert healthy.closed_with == 0
    assert "gated cannot be closed" in caplog.text


def test_upkeep_that_failed_once_goes_on(
    threads: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "UPKEEP_SECONDS", 0.01)
    calls: list[int] = []

    def upkeep() -> float:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ValueError("once")
        return 0.001

    threads(GatedTier(opened=True)).repeat(lambda: upkeep)
    assert until(lambda: len(calls) > 5)
    assert caplog.text.count("upkeep failed, and is tried again") == 1
