"""The I/O threads: order, wake-ups, cancellation, ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import PathUnusableError
from kvstore.testing.bench import key_of
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.threads import LOADS_IN_A_ROW, IOThreads, Parts
from tests.patience import PATIENCE, TOO_LONG, until, until_async
from tests.tiers.support import SEGMENT, bench_of, disk_of

Pool = Callable[[int], IOThreads]


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Starts threads that end with the test."""
    pools: list[IOThreads] = []

    def start(count: int) -> IOThreads:
        pools.append(IOThreads(count, "test"))
        return pools[-1]

    yield start
    for threads in pools:
        assert threads.close(), "an I/O thread did not end"


class Gate:
    """An operation that has begun, and ends when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.begun.set()
        assert self.opened.wait(PATIENCE)
        self.ended = True
        return "through"


def run(
    threads: IOThreads, operations: Sequence[Callable[[], Any]], *, load: bool
) -> Coroutine[Any, Any, list[Any]]:
    """Run `operations` as one job."""
    return threads.run_cut(lambda: operations, load=load)


class Order:
    """Jobs of which each tells when it is done."""

    def __init__(self, threads: IOThreads) -> None:
        self.threads = threads
        self.told: list[str] = []

    def begin(self, name: str, count: int = 1) -> asyncio.Future[list[Any]]:
        """Begin a job of so many operations, which is a "load" or a "store"."""
        operations = [lambda: self.told.append(name)] * count
        return asyncio.ensure_future(run(self.threads, operations, load=name == "load"))

    def grow(self) -> asyncio.Future[None]:
        told = partial(self.told.append, "grow")
        return asyncio.ensure_future(self.threads.run(told, ahead=True))


async def begun(gate: Gate) -> None:
    """Wait until a thread is at the gate; the loop goes on meanwhile."""
    assert await asyncio.to_thread(gate.begun.wait, PATIENCE)


async def test_operations_of_one_job_run_at_the_same_time_and_their_results_keep_its_order(
    pool: Pool,
) -> None:
    together = threading.Barrier(4)

    def operation(n: int) -> int:
        together.wait(PATIENCE)
        time.sleep(0.004 * (2, 0, 3, 1)[n])
        return n

    results = await run(pool(4), [partial(operation, n) for n in range(4)], load=True)
    assert results == [0, 1, 2, 3]


async def test_stores_take_all_threads_but_one(pool: Pool) -> None:
    threads, together = pool(4), threading.Barrier(3)
    results = await run(threads, [lambda: together.wait(PATIENCE)] * 3, load=False)
    assert sorted(results) == [0, 1, 2]
    gates = [Gate() for _ in range(4)]
    stores = asyncio.ensure_future(run(threads, gates, load=False))
    for gate in gates[:3]:
        await begun(gate)
    await asyncio.sleep(0.02)
    assert not gates[3].begun.is_set()
    for gate in gates:
        gate.opened.set()
    assert await stores == ["through"] * 4


async def test_a_load_begins_at_once_however_many_stores_have_begun(pool: Pool) -> None:
    threads, gates = pool(3), [Gate() for _ in range(5)]
    stores = asyncio.ensure_future(run(threads, gates, load=False))
    await begun(gates[1])
    for _ in range(3):
        assert await run(threads, [lambda: "loaded"] * 7, load=True) == ["loaded"] * 7
    assert not any(gate.ended for gate in gates)
    for gate in gates:
        gate.opened.set()
    assert await stores == ["through"] * 5


async def test_a_store_that_comes_with_a_slow_load_does_not_wait_for_it(pool: Pool) -> None:
    """Whichever thread was woken for which, all others are idle."""
    for _ in range(40):
        threads, slow = pool(4), Gate()
        await asyncio.sleep(0.005)
        load = asyncio.ensure_future(run(threads, [slow], load=True))
        store = asyncio.ensure_future(run(threads, [lambda: "stored"], load=False))
        async with asyncio.timeout(PATIENCE / 4):
            assert await store == ["stored"]
        assert not slow.ended
        slow.opened.set()
        assert await load == ["through"]


async def test_loads_that_come_together_begin_together(pool: Pool) -> None:
    for _ in range(20):
        threads, gates = pool(2), [Gate(), Gate()]
        loads = [asyncio.ensure_future(run(threads, [gate], load=True)) for gate in gates]
        for gate in gates:
            await begun(gate)
        for gate in gates:
            gate.opened.set()
        assert await asyncio.gather(*loads) == [["through"], ["through"]]


# -- operations of two parts ------------------------------------------------------------------


class Halves:
    """An operation of two parts: the second one ends when the test says so."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> Parts[str]:
        self.told.append(f"{self.name} begins")
        self.begun.set()
        yield
        assert self.opened.wait(PATIENCE)
        self.told.append(f"{self.name} ends")
        return self.name

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, PATIENCE)


def told_of(told: list[str], *names: str) -> list[Halves]:
    return [Halves(name, told) for name in names]


async def test_the_next_operation_begins_before_the_last_one_has_ended(pool: Pool) -> None:
    told: list[str] = []
    one, two, three = told_of(told, "one", "two", "three")
    job = asyncio.ensure_future(pool(1).run_cut(lambda: [one, two, three], load=True))
    await two.has_begun()
    assert told == ["one begins", "two begins"]
    for each in (one, two, three):
        each.opened.set()
    assert await job == ["one", "two", "three"]
    assert told == [
        "one begins",
        "two begins",
        "one ends",
        "three begins",
        "two ends",
        "three ends",
    ]


async def test_what_an_idle_thread_can_begin_is_left_to_it(pool: Pool) -> None:
    told: list[str] = []
    threads = pool(3)
    halves = told_of(told, "one", "two", "three")
    job = asyncio.ensure_future(threads.run_cut(lambda: halves, load=True))
    for each in halves:
        await each.has_begun()
    # Each ends although the others do not: no thread has two of them.
    for each in reversed(halves):
        each.opened.set()
        await until_async(partial(contains, told, f"{each.name} ends"))
    assert await job == ["one", "two", "three"]


async def test_a_long_operation_does_not_begin_before_the_last_one_has_ended(pool: Pool) -> None:
    told: list[str] = []
    threads, (one,) = pool(1), told_of(told, "one")
    first = asyncio.ensure_future(threads.run_cut(lambda: [one], load=False))
    await one.has_begun()
    second = asyncio.ensure_future(threads.run(lambda: told.append("long")))
    await asyncio.sleep(0.05)
    one.opened.set()
    await asyncio.gather(first, second)
    assert told == ["one begins", "one ends", "long"]


async def test_a_load_that_comes_while_a_store_is_moved_begins_at_once(pool: Pool) -> None:
    told: list[str] = []
    threads = pool(1)
    stores, (load,) = told_of(told, "store", "next store"), told_of(told, "load")
    storing = asyncio.ensure_future(threads.run_cut(lambda: stores, load=False))
    await stores[1].has_begun()
    loading = asyncio.ensure_future(threads.run_cut(lambda: [load], load=True))
    await asyncio.sleep(0)
    stores[0].opened.set()
    await load.has_begun()
    assert "next store ends" not in told
    stores[1].opened.set()
    load.opened.set()
    await asyncio.gather(storing, loading)


@pytest.mark.parametrize("part", ["first", "second"])
async def test_what_either_part_raises_is_told_after_all_have_ended_and_costs_no_thread(
    pool: Pool, part: str
) -> None:
    told: list[str] = []
    (sound,) = told_of(told, "sound")

    def fails() -> Parts[str]:
        if part == "second":
            yield
        raise ZeroDivisionError("a fault in the tier")

    threads = pool(1)
    operations: list[Callable[[], Parts[str]]] = [fails, sound]
    job = asyncio.ensure_future(threads.run_cut(lambda: operations, load=True))
    await sound.has_begun()
    await asyncio.sleep(0.01)
    assert not job.done(), "the job ended before all of its operations had"
    sound.opened.set()
    done, _ = await asyncio.wait({job}, timeout=PATIENCE)
    assert done, "the job of an operation that raised never ends"
    with pytest.raises(ZeroDivisionError):
        job.result()
    assert told == ["sound begins", "sound ends"]
    assert await run(threads, [lambda: "alive"], load=True) == ["alive"]


async def test_an_operation_of_three_parts_is_a_mistake(pool: Pool) -> None:
    def goes_on() -> Parts[str]:
        yield
        yield
        return "too long"

    with pytest.raises(RuntimeError, match="two parts at most"):
        await pool(1).run_cut(lambda: [goes_on], load=True)


@pytest.mark.parametrize("load", [True, False])
async def test_a_job_of_no_operations_is_done_at_once(pool: Pool, load: bool) -> None:
    operations: list[Callable[[], object]] = []
    job = asyncio.ensure_future(run(pool(1), operations, load=load))
    done, _ = await asyncio.wait({job}, timeout=PATIENCE)
    assert done, "an empty job never ends"
    assert job.result() == []


async def test_what_stores_may_wait_for_overtakes_them_and_no_load(pool: Pool) -> None:
    threads, gate = pool(1), Gate()
    order = Order(threads)
    first = asyncio.ensure_future(run(threads, [gate], load=False))
    await begun(gate)
    jobs: list[asyncio.Future[Any]]
    jobs = [order.begin("store", 3), order.begin("store", 3), order.grow(), order.grow()]
    await asyncio.sleep(0)
    jobs.append(order.begin("load", 2))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, *jobs)
    assert order.told == ["load"] * 2 + ["grow"] * 2 + ["store"] * 6


async def test_one_job_wakes_the_loop_once(pool: Pool) -> None:
    threads = pool(4)
    loop = asyncio.get_running_loop()
    wake_ups: list[Any] = []
    wake = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
        wake_ups.append(callback)
        return wake(callback, *args, **options)

    loop.call_soon_threadsafe = counted  # type: ignore[assignment]
    await run(threads, [lambda: None] * 100, load=True)
    assert len(wake_ups) == 1


async def test_a_cancelled_job_ends_only_when_its_operations_have(pool: Pool) -> None:
    """Those that had not begun still run."""
    gate, ran = Gate(), list[int]()
    operations: list[Callable[[], object]] = [gate, lambda: ran.append(1)]
    job = asyncio.ensure_future(run(pool(1), operations, load=False))
    await begun(gate)
    for _ in range(3):
        job.cancel()
        done, _ = await asyncio.wait({job}, timeout=0.01)
        assert not done
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert gate.ended
    assert ran == [1]


async def test_an_idle_thread_keeps_nothing_of_its_last_job_alive(pool: Pool) -> None:
    class Memory:
        def use(self) -> None:
            pass

    threads, memory = pool(1), Memory()
    gone = weakref.ref(memory)
    await run(threads, [memory.use], load=True)
    del memory
    await until_async(lambda: gc.collect() >= 0 and gone() is None)


async def test_idle_waits_for_jobs_and_not_for_those_who_asked(pool: Pool) -> None:
    threads, gate = pool(1), Gate()
    job = asyncio.ensure_future(run(threads, [gate], load=True))
    await begun(gate)
    idle = asyncio.ensure_future(threads.idle())
    done, _ = await asyncio.wait({idle}, timeout=0.01)
    assert not done
    gate.opened.set()
    await asyncio.wait_for(idle, PATIENCE)
    assert await job == ["through"]
    await asyncio.wait_for(threads.idle(), PATIENCE)


async def test_close_lets_operations_end_that_have_begun_or_are_queued(pool: Pool) -> None:
    told: list[str] = []
    threads, halves = pool(1), told_of(told, "one", "two", "three", "four")
    job = asyncio.ensure_future(threads.run_cut(lambda: halves, load=False))
    await halves[1].has_begun()
    closing = asyncio.ensure_future(asyncio.to_thread(threads.close))
    await asyncio.sleep(0.05)
    for each in halves:
        each.opened.set()
    assert await closing
    assert await job == ["one", "two", "three", "four"]


async def test_a_closed_pool_takes_no_job(pool: Pool) -> None:
    threads = pool(1)
    assert threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        await run(threads, [lambda: None], load=True)


async def test_close_tells_of_a_stuck_thread_in_the_time_it_was_given(pool: Pool) -> None:
    threads, gates = pool(3), [Gate(), Gate(), Gate()]
    job = asyncio.ensure_future(run(threads, gates, load=True))
    for gate in gates:
        await begun(gate)
    start = time.monotonic()
    assert not await asyncio.to_thread(threads.close, 2.0)
    assert time.monotonic() - start < 2.0 * 3 - 0.5, "the time was given for all threads together"
    for gate in gates:
        gate.opened.set()
    await job


def test_an_operation_that_outlives_its_loop_does_no_harm() -> None:
    code = """
import asyncio, threading
from kvstore.tiers.disk.threads import IOThreads
threads, begun, gate = IOThreads(1, "test"), threading.Event(), threading.Event()
async def main():
    job = asyncio.ensure_future(threads.run_cut(lambda: [begun.set, gate.wait], load=True))
    await asyncio.sleep(0)
    begun.wait(10)
    return job
loop = asyncio.new_event_loop()
job = loop.run_until_complete(main())
loop.close()
gate.set()
print(asyncio.run(threads.run(lambda: "alive")), job.done())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["alive", "False"]
    assert "Exception in thread" not in done.stderr


def test_a_stuck_operation_does_not_keep_the_process_from_exiting() -> None:
    code = """
import asyncio, threading
from kvstore.tiers.disk.threads import IOThreads
async def main():
    threads = IOThreads(2, "stuck")
    asyncio.ensure_future(threads.run(threading.Event().wait))
    await asyncio.sleep(0.05)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, capture_output=True)
    assert done.returncode == 0


async def test_the_last_thread_to_end_does_what_is_to_be_done_then() -> None:
    threads, gate = IOThreads(3, "test"), Gate()
    told: list[str] = []
    job = asyncio.ensure_future(run(threads, [gate], load=True))
    await begun(gate)
    ending = asyncio.ensure_future(
        threads.end(lambda: told.append(threading.current_thread().name))
    )
    for _ in range(3):
        await asyncio.wait({ending}, timeout=0.02)
        ending.cancel()
        await asyncio.sleep(0)
        assert not ending.done()
    assert told == []
    gate.opened.set()
    assert await job == ["through"]
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert len(told) == 1
    assert told[0].startswith("test-io-")


async def test_what_is_to_be_done_at_the_end_is_done_after_a_call_that_was_left() -> None:
    threads, gate = IOThreads(2, "test"), Gate()
    done = threading.Event()
    job = asyncio.ensure_future(run(threads, [gate], load=True))
    await begun(gate)
    threads.detach()
    with pytest.raises(TimeoutError):
        await job
    with pytest.raises(TimeoutError):
        await threads.end(done.set)
    assert not done.is_set()
    gate.opened.set()
    assert await asyncio.to_thread(done.wait, PATIENCE)


def test_a_lane_whose_threads_cannot_be_started_is_let_go_of_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, itertools.count(1)

    def third_fails(thread: threading.Thread) -> None:
        if next(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    before, alive = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", third_fails)
        with pytest.raises(PathUnusableError, match=r"lane-0: no I/O thread can be started"):
            bench_of(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before
    until(lambda: not [one for one in threading.enumerate() if one not in alive])
    bench_of(tmp_path).tier.abandon()


async def test_under_loads_without_end_others_have_a_turn_now_and_then(pool: Pool) -> None:
    threads, gate = pool(1), Gate()
    order = Order(threads)
    first = asyncio.ensure_future(run(threads, [gate], load=True))
    await begun(gate)
    jobs: list[asyncio.Future[Any]] = [order.begin("load") for _ in range(3 * LOADS_IN_A_ROW)]
    jobs += [order.begin("store"), order.grow()]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, *jobs)
    # The first load counts, too.
    assert order.told.index("grow") == LOADS_IN_A_ROW - 1
    assert order.told.index("store") == 2 * LOADS_IN_A_ROW


async def test_a_segment_is_not_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core never asks for that. If it did, another file could get the descriptor."""
    bench = bench_of(tmp_path)
    keys = [key_of(n) for n in range(4)]
    await bench.store(keys, range(4))
    volume, gate = disk_of(bench).volumes[0], Gate()
    begin = volume.backend.begin

    def slow(*given: Any, load: bool) -> Any:
        gate()
        return begin(*given, load=load)

    monkeypatch.setattr(volume.backend, "begin", slow)
    reading = asyncio.ensure_future(bench.fetch(keys, range(4)))
    await begun(gate)
    told = await bench.tier.remove_segment(0)
    assert told is not None
    assert told.endswith("is in use")
    gate.opened.set()
    assert await reading == [True] * 4
    assert await bench.tier.remove_segment(0) is None
    await bench.tier.close([])


async def test_growth_that_never_ends_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what writes records alone, which may be as often as there are threads."""
    bench, gate, create = bench_of(tmp_path), Gate(), Segment.create
    keys = [key_of(n) for n in range(4)]
    await bench.store(keys, range(4))

    def slow(*given: Any) -> Segment:
        gate()
        return create(*given)

    monkeypatch.setattr(Segment, "create", slow)
    growing = asyncio.ensure_future(bench.tier.grow())
    await begun(gate)
    for _ in range(disk_of(bench).volumes[0].threads.count):
        async with asyncio.timeout(TOO_LONG):
            assert await bench.tier.note_uses(keys[:1], [0]) is None
            assert await bench.tier.erase([key_of(99)]) is None
            assert await disk_of(bench).list_segment(0)
    assert (await bench.store([key_of(5)], [5])).ok == [True]
    gate.opened.set()
    assert (await growing)[0] == 1
    await bench.tier.close([])


async def test_the_size_is_set_without_a_call_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set on an event loop, and a file system may hang."""
    bench = bench_of(tmp_path, segments=3)

    def refused(*given: Any) -> None:
        raise AssertionError("a call of the system")

    with monkeypatch.context() as patched:
        for name in ("statvfs", "listdir", "stat", "open"):
            patched.setattr(os, name, refused)
        bench.tier.resize(2 * SEGMENT)
    assert (await bench.tier.grow())[0] == 1
    assert (await bench.tier.grow())[0] is None
    await bench.tier.close([])
