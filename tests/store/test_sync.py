"""The synchronous face: the same answers, from any thread, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.put import COPY_INLINE_BYTES
from kvstore.api.store import Store
from kvstore.api.sync import SyncStore
from kvstore.errors import BlockKeyError, ConfigError, KVStoreError, LeaseEndedError
from tests.patience import PATIENCE, TOO_LONG, until
from tests.store.support import CHUNK, hold, keys_of, payloads, program, small

KEYS, ON_DISK = keys_of("a", 4), keys_of("on disk", 4)

Open = Callable[..., AbstractContextManager[SyncStore]]


@pytest.fixture
def open_sync(tmp_path: Path) -> Open:
    """As `open_store`."""

    @contextmanager
    def open_sync(
        rows: int = 8, disk: int = 0, holds: Sequence[bytes] = (), **more: Any
    ) -> Iterator[SyncStore]:
        with kvstore.open_sync(small(tmp_path / "cache", rows, disk, **more)) as store:
            if holds:
                assert store.put(holds, payloads(holds)) == len(holds)
            yield store

    return open_sync


def own_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "kvstore-sync"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not own_threads())


def contents(store: SyncStore, keys: Sequence[bytes]) -> list[bytes]:
    with store.get(keys) as chunks:
        return [bytes(chunk) for chunk in chunks]


def busy(store: SyncStore) -> int:
    return store.stats().busy_rows


def fill(open_sync: Open) -> None:
    """Leave chunks on disk, and nothing in host memory."""
    with open_sync(disk=64) as store:
        store.put(ON_DISK, payloads(ON_DISK))


def still_works(store: SyncStore) -> None:
    fresh = keys_of("fresh", 4)
    until(lambda: busy(store) == 0)
    assert store.put(fresh, payloads(fresh), timeout=PATIENCE) == 4
    assert contents(store, fresh) == payloads(fresh)
    assert store.flush(PATIENCE)
    assert busy(store) == 0


def _get(store: SyncStore, keys: Sequence[bytes] = KEYS, seconds: float | None = None) -> None:
    with store.get(keys, timeout=seconds):
        pass


CALLS: dict[str, Callable[[SyncStore], Any]] = {
    "lookup_prefix": lambda store: store.lookup_prefix(KEYS),
    "contains": lambda store: store.contains(KEYS),
    "contains_prefix": lambda store: store.contains_prefix(KEYS),
    "resolve": lambda store: store.resolve(KEYS),
    "put": lambda store: store.put(KEYS, payloads(KEYS)),
    "put of nothing": lambda store: store.put([], []),
    "get": _get,
    "get_into": lambda store: store.get_into(KEYS, [bytearray(CHUNK) for _ in KEYS]),
    "wait": lambda store: store.wait(KEYS),
    "stream": lambda store: store.stream(KEYS, 2),
    "drain_events": lambda store: store.drain_events(),
    "windows": lambda store: store.windows(KEYS, 2),
    "flush": lambda store: store.flush(),
    "remove": lambda store: store.remove(KEYS),
    "prefetch": lambda store: store.prefetch(KEYS),
    "demote": lambda store: store.demote(KEYS),
    "pin": lambda store: store.pin(KEYS, 60.0),
    "unpin": lambda store: store.unpin(KEYS),
    "reset": lambda store: store.reset(),
    "refuse_command": lambda store: store.refuse_command("reset", "another way"),
    "compact": lambda store: store.compact(0),
    "release": lambda store: store.release("mine"),
    "take_events": lambda store: store.take_events(),
    "stats": lambda store: store.stats(),
    "enter": lambda store: store.__enter__(),
}


# -- the same face ---------------------------------------------------------------------------


def public(cls: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(cls).items()
        if callable(member) and not name.startswith("_")
    }


def test_it_has_every_method_of_the_asyncio_face_with_the_same_arguments() -> None:
    theirs, ours = public(Store), public(SyncStore)
    assert set(theirs) == set(ours)
    assert {name.split()[0] for name in CALLS} - {"enter"} == set(ours) - {"close"}
    for name, method in theirs.items():
        mine = inspect.signature(ours[name]).parameters
        assert [str(each) for each in inspect.signature(method).parameters.values()] == [
            str(each) for each in mine.values()
        ], name


def test_what_a_method_says_of_itself_begins_as_it_does_there() -> None:
    ours = public(SyncStore)
    for name, method in public(Store).items():
        if name not in ("get", "close"):
            said = str(inspect.getdoc(ours[name]))
            assert said.split("\n")[0] == str(inspect.getdoc(method)).split("\n")[0]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_what_was_put_is_found_after_a_restart(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    wide = keys_of("wide", 32)
    with open_sync(disk=64) as store:
        assert store.put(wide, payloads(wide)) == 32
        assert store.chunk_bytes == CHUNK
        assert "lane-0" in store.description
    with open_sync(disk=64) as store:
        assert store.lookup_prefix(wide[:4]) is None
        assert store.resolve(wide[:4]) == 4
        assert store.lookup_prefix(wide[:4]) == 4
        assert contents(store, wide[:4]) == payloads(wide[:4])
        assert store.stats().loaded_from["disk"] == 4
        store.reset()
        assert store.resolve(wide) == 0


Act = tuple[str, tuple[Any, ...]]


def acts(seed: int) -> list[Act]:
    """Acts whose answers do not depend on how fast the disk is."""
    rng = random.Random(seed)
    prompts = [[*keys_of("common", 3), *keys_of(f"{seed}/{n}", 12, 3)] for n in range(6)]
    made: list[Act] = []
    for _ in range(50):
        keys = rng.choice(prompts)[: rng.randrange(13)]
        name = rng.choice([None, "one", "other"])
        kinds = ["put"] * 4 + ["get"] * 6 + ["resolve"] * 3 + ["flush", "events", "bad", "reset"]
        what = rng.choice(kinds)
        made.append((what, (keys, name)))
        if name is not None:
            made.append(("release", (name,)))
    return made


def act(store: Any, get: Callable[..., Any], what: str, arguments: tuple[Any, ...]) -> Any:
    """The answer of either face, or a coroutine that has it."""
    match what:
        case "put":
            return store.put(arguments[0], payloads(arguments[0]), arguments[1])
        case "get":
            return get(*arguments)
        case "resolve":
            return store.resolve(*arguments)
        case "flush":
            return store.flush(PATIENCE)
        case "reset":
            return store.reset()
        case "release":
            return store.release(*arguments)
        case "events":
            return sorted(map(repr, store.take_events())) != []
    return store.put([b""], [b""])


async def play(store: Any, given: list[Act], ask: Callable[..., Awaitable[Any]]) -> list[object]:
    told: list[object] = []
    for what, arguments in given:
        try:
            told.append(await ask(what, arguments))
            if what == "put":
                # How much room there is depends on what still waits for the disk.
                await ask("flush", ())
        except KVStoreError as error:
            told.append((type(error), str(error)))
    return [*told, store.stats().stored]


async def on_a_loop(config: dict[str, Any], given: list[Act]) -> list[object]:
    async with kvstore.open(config) as store:

        async def get(keys: list[bytes], name: str | None) -> object:
            async with store.get(keys, name) as chunks:
                return list(chunks.keys), [bytes(chunk) for chunk in chunks]

        async def ask(*what: Any) -> Any:
            answer = act(store, get, *what)
            return await answer if inspect.isawaitable(answer) else answer

        return await play(store, given, ask)


async def in_threads(config: dict[str, Any], given: list[Act]) -> list[object]:
    """Each call in another thread than the one before."""
    with ThreadPoolExecutor(3) as pool, kvstore.open_sync(config) as store:

        def get(keys: list[bytes], name: str | None) -> object:
            with store.get(keys, name) as chunks:
                return list(chunks.keys), [bytes(chunk) for chunk in chunks]

        def ask(*what: Any) -> Awaitable[Any]:
            return asyncio.wrap_future(pool.submit(act, store, get, *what))

        return await play(store, given, ask)


@pytest.mark.parametrize("seed", range(2))
def test_both_faces_give_the_same_answers(tmp_path: Path, seed: int) -> None:
    given = acts(seed)
    there = small(tmp_path / "there", 8, 256, keep_events=True)
    here = small(tmp_path / "here", 8, 256, keep_events=True)
    told = asyncio.run(in_threads(here, given))
    assert told == asyncio.run(on_a_loop(there, given))
    assert any(isinstance(each, tuple) and each[0] is BlockKeyError for each in told)
    assert any(isinstance(each, tuple) and len(each[1]) > 4 for each in told)


# -- errors ----------------------------------------------------------------------------------


def test_errors_keep_their_types_and_change_nothing(open_sync: Open) -> None:
    with open_sync(disk=16) as store:
        assert store.put(KEYS, payloads(KEYS)) == 4
        with pytest.raises(BlockKeyError):
            store.lookup_prefix([b""])
        with pytest.raises(BlockKeyError):
            store.get("keys")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="bytes_per_second"):
            store.compact("fast")
        with pytest.raises(KVStoreError, match="a chunk must have"):
            store.put(KEYS, [b""] * 4)
        with pytest.raises(KVStoreError, match="request must be"):
            store.release(5)  # type: ignore[arg-type]
        with pytest.raises(KVStoreError, match="timeout must be"):
            store.resolve(KEYS, timeout="1")  # type: ignore[arg-type]
        with pytest.raises(KVStoreError, match="timeout must be"):
            store.close(float("nan"))
        still_works(store)


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        kvstore.open_sync({"cpu_bytes_to_use": "1MiB"})
    assert not own_threads()


def test_an_open_whose_time_is_up_leaves_nothing_open(
    tmp_path: Path, open_sync: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TimeoutError, match="open_sync took longer than 0 s"):
        kvstore.open_sync(small(tmp_path / "cache", disk=16), timeout=0)
    assert not own_threads()

    def lane_is_free() -> bool:
        with open_sync(disk=16) as store:
            return "lane-0" in store.description

    until(lane_is_free)


# -- time ------------------------------------------------------------------------------------


WAITS: dict[str, Callable[[SyncStore, float], object]] = {
    "get": lambda store, seconds: _get(store, ON_DISK, seconds),
    "resolve": lambda store, seconds: store.resolve(ON_DISK, timeout=seconds),
    "put": lambda store, seconds: store.put(KEYS, payloads(KEYS), timeout=seconds),
    "reset": lambda store, seconds: store.reset(seconds),
}


@contextmanager
def stopped(open_sync: Open, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncStore]:
    """A store whose disk does not answer, and whose host memory is full of what waits for it."""
    fill(open_sync)
    with open_sync(rows=4, disk=64) as store:
        gates = [hold(monkeypatch, method) for method in ("read", "write", "clear")]
        others = keys_of("others", 4)
        assert store.put(others, payloads(others)) == 4
        try:
            yield store
        finally:
            for gate in gates:
                gate.set()
        still_works(store)


@pytest.mark.parametrize("call", WAITS)
def test_a_call_whose_time_is_up_names_itself_and_leaves_nothing_held(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with stopped(open_sync, monkeypatch) as store:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=f"^{call} took longer than 0.05 s$"):
            WAITS[call](store, 0.05)
        assert time.monotonic() - start < PATIENCE
        assert store.stats().waiting == 0
        assert store._calls._left == set()


def test_a_flush_whose_time_is_up_says_so_as_it_does_there(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped(open_sync, monkeypatch) as store:
        assert store.flush(0.05) is False


def test_a_close_whose_time_is_up_closes_all_the_same(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sync(disk=64, write_queue_bytes=CHUNK) as store:
        gate = hold(monkeypatch, "write")
        store.put(KEYS, payloads(KEYS))
        threading.Timer(0.3, gate.set).start()
        with pytest.raises(TimeoutError, match="close took longer than 0.05 s"):
            store.close(0.05)
        assert not own_threads()
        store.close()
    with open_sync(disk=64) as store:
        assert "lane-0" in store.description


def test_many_threads_whose_time_is_always_up_leave_nothing_held(open_sync: Open) -> None:
    prompts = [keys_of(str(number), 4) for number in range(8)]
    with open_sync(rows=8, disk=256) as store:
        for keys in prompts:
            store.put(keys, payloads(keys))

        def hammer(number: int) -> tuple[int, int]:
            rng, ended, late = random.Random(number), 0, 0
            for _ in range(60):
                keys = rng.choice(prompts)
                seconds = rng.choice([0.0, 0.0002, 0.001, 0.005, PATIENCE])
                try:
                    if rng.random() < 0.3:
                        store.put(keys, payloads(keys), timeout=seconds)
                    with store.get(keys, timeout=seconds) as chunks:
                        here = [bytes(chunk) for chunk in chunks]
                        assert here == payloads(keys)[: len(here)]
                    ended += 1
                except TimeoutError:
                    late += 1
            return ended, late

        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(hammer, range(4)))
        assert sum(late for _, late in counts) > 20
        assert sum(ended for ended, _ in counts) > 20
        still_works(store)


# -- leases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_ends_the_block_ends_the_lease(
    open_sync: Open, error: type[BaseException]
) -> None:
    with open_sync(holds=KEYS) as store:
        with pytest.raises(error), store.get(KEYS) as chunks:
            assert busy(store) == 4
            raise error
        assert busy(store) == 0
        with pytest.raises(LeaseEndedError):
            chunks[0]


def test_a_lease_may_be_left_in_another_thread_and_is_begun_once(open_sync: Open) -> None:
    with open_sync(holds=KEYS) as store:
        lease = store.get(KEYS)
        lease.__enter__()
        with pytest.raises(KVStoreError, match="begun once"):
            lease.__enter__()
        assert busy(store) == 4
        thread = threading.Thread(target=lease.__exit__, args=(None, None, None))
        thread.start()
        thread.join(PATIENCE)
        assert busy(store) == 0


def test_a_lease_that_outlives_its_store_keeps_its_bytes_until_it_ends(open_sync: Open) -> None:
    with open_sync(holds=KEYS) as store:
        with store.get(KEYS) as chunks:
            store.close()
            assert [bytes(chunk) for chunk in chunks] == payloads(KEYS)
        with pytest.raises(LeaseEndedError):
            chunks[0]


# -- threads ---------------------------------------------------------------------------------


def test_calls_of_many_threads_at_once_give_right_bytes_and_leave_nothing_held(
    open_sync: Open,
) -> None:
    common = keys_of("common", 4)
    with open_sync(rows=32, disk=512) as store:

        def use(number: int) -> int:
            rng, found = random.Random(number), 0
            mine = [common + keys_of(f"{number}/{prompt}", 8, 4) for prompt in range(4)]
            for _ in range(12):
                keys = rng.choice(mine)
                n = store.resolve(keys)
                with store.get(keys[:n]) as chunks:
                    assert [bytes(chunk) for chunk in chunks] == payloads(keys[: len(chunks)])
                    found += len(chunks)
                store.put(keys[n:], payloads(keys[n:]))
                assert store.lookup_prefix(keys[:1], f"{number}") in (None, 0, 1)
                store.release(f"{number}")
            return found

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(use, range(8))) > 100
        assert store.flush(PATIENCE)
        assert busy(store) == 0


def test_buffers_may_be_an_iterable_that_calls_the_store(open_sync: Open) -> None:
    other = keys_of("b", 4)
    with open_sync(rows=16, holds=KEYS) as store:
        assert store.put(other, (contents(store, [key])[0] for key in KEYS)) == 4
        assert contents(store, other) == payloads(KEYS)


@pytest.fixture
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_change_often")
def test_a_buffer_may_be_changed_as_soon_as_its_put_has_returned(open_sync: Open) -> None:
    with open_sync() as store:
        for number in range(1000):
            buffer = bytearray(payloads(KEYS[:1])[0])
            store.put([b"%d" % number], [buffer])
            # Refused while anything still looks at it.
            buffer += b"more"


def test_calls_on_the_stores_own_thread_are_refused_and_not_waited_for(open_sync: Open) -> None:
    with open_sync() as store:
        for call in [*CALLS.values(), SyncStore.close]:
            with pytest.raises(KVStoreError, match="the store's own loop"):
                store._calls.ask(partial(call, store))
        still_works(store)


def test_calls_after_the_end_are_refused(open_sync: Open) -> None:
    with open_sync() as store:
        store.close()
        for call in CALLS.values():
            with pytest.raises(KVStoreError, match="the store is closed"):
                call(store)
        store.close()
        assert "host" in store.description


@pytest.mark.parametrize("call", ["get", "resolve", "put", "reset"])
def test_who_waits_while_another_thread_closes_is_told(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fill(open_sync)
    with open_sync(rows=4, disk=64, shutdown_timeout_s=0.2) as store:
        gates = [hold(monkeypatch, method) for method in ("read", "write", "clear")]
        others = keys_of("others", 4)
        store.put(others, payloads(others))
        with ThreadPoolExecutor(3) as pool:
            waiting = pool.submit(WAITS[call], store, TOO_LONG)
            time.sleep(0.05)
            closing = [pool.submit(store.close) for _ in range(2)]
            with pytest.raises(KVStoreError, match="the store is closed"):
                waiting.result(PATIENCE)
            for gate in gates:
                gate.set()
            assert [each.result(PATIENCE) for each in closing] == [None, None]


# -- interrupts ------------------------------------------------------------------------------


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C comes, as often as it takes."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", WAITS)
def test_who_is_interrupted_while_it_waits_leaves_nothing_held(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with stopped(open_sync, monkeypatch) as store:
        with interrupted_after(0.05):
            WAITS[call](store, TOO_LONG)
        assert store.stats().waiting == 0
        assert store._calls._left == set()


def test_an_interrupt_at_the_end_of_windows_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.open_sync(small(tmp_path)) as store:
        store.put(KEYS, payloads(KEYS))

        def interrupted(begin: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), store.windows(KEYS, 2) as windows:
            assert len(next(windows)) == 2
            monkeypatch.setattr(windows._calls, "wait", interrupted)
        monkeypatch.undo()
        until(lambda: store.stats().busy_rows == 0)


def test_an_interrupt_just_after_a_lease_has_begun_ends_it(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sync(holds=KEYS) as store:
        real = store._calls.wait

        def interrupted(begin: Any) -> Any:
            real(begin)
            raise KeyboardInterrupt

        monkeypatch.setattr(store._calls, "wait", interrupted)
        lease = store.get(KEYS)
        with pytest.raises(KeyboardInterrupt):
            lease.__enter__()
        assert busy(store) == 0
        monkeypatch.undo()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_leave_nothing_held(open_sync: Open) -> None:
    """A hundred moments some microseconds apart: in calls, in blocks, and between them."""
    interrupts = 0
    with open_sync(rows=8, holds=KEYS) as store:
        for moment in range(100):
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + moment * 4e-6)
                for _ in range(3):
                    _get(store)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                signal.signal(signal.SIGALRM, before)
        assert interrupts > 50
        gc.collect()
        still_works(store)


def test_a_close_that_is_interrupted_lets_go_of_everything(
    open_sync: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sync(disk=64, write_queue_bytes=CHUNK) as store:
        gate = hold(monkeypatch, "write")
        store.put(KEYS, payloads(KEYS))
        threading.Timer(2.0, gate.set).start()
        with interrupted_after(0.5):
            store.close()
        assert not own_threads()
    with open_sync(disk=64) as store:
        assert "lane-0" in store.description


# -- forks -----------------------------------------------------------------------------------


def in_a_child(act: Callable[[], object]) -> str:
    """What `act` raises in the child of a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # One that hangs is ended, whatever handles signals here.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(round(PATIENCE))
        try:
            act()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


REFUSED = re.compile(
    r"KVStoreError: the store belongs to process \d+, this is \d+; "
    "open one of your own after a fork"
)


def test_calls_after_a_fork_are_refused(open_sync: Open) -> None:
    with open_sync(holds=KEYS) as store:
        lease = store.get(KEYS)
        lease.__enter__()

        def leave(store: SyncStore) -> None:
            lease.__exit__(None, None, None)

        def each_is_refused() -> None:
            for call in [*CALLS.values(), SyncStore.close, leave]:
                with pytest.raises(KVStoreError) as told:
                    call(store)
                assert REFUSED.fullmatch(f"KVStoreError: {told.value}")

        assert in_a_child(each_is_refused) == "nothing"
        lease.__exit__(None, None, None)
        still_works(store)


def test_what_a_child_raises_on_its_way_out_is_not_hidden(open_sync: Open) -> None:
    with open_sync(holds=KEYS) as store:

        def leave() -> None:
            with store, store.get(KEYS):
                raise SystemExit(3)

        opened = store.get(KEYS)
        opened.__enter__()

        def leave_what_was_begun_before() -> None:
            try:
                raise SystemExit(3)
            except SystemExit as error:
                opened.__exit__(SystemExit, error, None)
                store.__exit__(SystemExit, error, None)
                raise

        assert REFUSED.fullmatch(in_a_child(leave))
        assert in_a_child(leave_what_was_begun_before) == "SystemExit: 3"
        opened.__exit__(None, None, None)
        still_works(store)


def test_a_child_that_is_forked_in_the_middle_of_calls_is_refused_and_ends(
    open_sync: Open,
) -> None:
    with open_sync() as store:
        ended = threading.Event()

        def call() -> None:
            while not ended.is_set():
                store.put(KEYS, payloads(KEYS))
                _get(store)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert REFUSED.fullmatch(in_a_child(store.stats))
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        still_works(store)


def test_a_child_may_open_a_store_of_its_own(open_sync: Open, tmp_path: Path) -> None:
    def act() -> None:
        with kvstore.open_sync(small(tmp_path / "cache", disk=16)) as store:
            assert "lane-1" in store.description
            assert store.put(KEYS, payloads(KEYS)) == 4
            assert contents(store, KEYS) == payloads(KEYS)

    with open_sync(disk=16) as store:
        assert in_a_child(act) == "nothing"
        still_works(store)


# -- the end of the interpreter --------------------------------------------------------------


HEAD = """
    import os, signal, sys, threading, time, kvstore, kvstore.api.sync

    # A slow disk is waited for.
    kvstore.api.sync.EXIT_SECONDS = 50.0

    size = int(sys.argv[2])
    config = {
        "cpu_bytes_to_use": 64 * size, "chunk_bytes": size, "shutdown_timeout_s": 180.0,
        "identity": {},
        "record_trace": sys.argv[1] + ".trace",
        "tiers": [{"type": "disk", "path": sys.argv[1], "capacity_bytes": 512 * size,
                   "segment_bytes": 32 * size}],
    }
    keys = [bytes([n]) * 32 for n in range(32)]
    buffers = [bytes([n]) * size for n in range(32)]
"""

FORGETFUL = {
    "by an error, in a lease": """
        def end():
            store = kvstore.open_sync(config)
            store.put(keys, buffers)
            store.flush()
            store.put([key + b"2" for key in keys], buffers)
            lease = store.get(keys)
            views = list(lease.__enter__())
            print("done")
            sys.exit(0)
        end()
    """,
    "while a daemon waits": """
        store = kvstore.open_sync(config)
        store.put(keys, buffers)
        store.flush()
        def use():
            while True:
                store.put(keys, buffers)
                with store.get(keys):
                    pass
        def quietly():
            try:
                use()
            except kvstore.KVStoreError:
                time.sleep(60)
        threading.Thread(target=quietly, daemon=True).start()
        time.sleep(0.1)
        print("done")
    """,
    "while a thread goes on": """
        store = kvstore.open_sync(config)
        def use():
            threading.main_thread().join()
            time.sleep(0.1)
            assert store.put(keys, buffers) == 32
            assert store.flush()
            print("done")
        threading.Thread(target=use).start()
    """,
    "in the child of a fork": """
        store = kvstore.open_sync(config)
        store.put(keys, buffers)
        store.flush()
        child = os.fork()
        if not child:
            signal.alarm(20)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("done")
    """,
}


@pytest.mark.parametrize("way", FORGETFUL)
def test_an_interpreter_that_ends_with_an_open_store_ends_in_peace(
    tmp_path: Path, way: str
) -> None:
    # Copied by a thread of the interpreter, which takes no work any more when it ends.
    size = COPY_INLINE_BYTES
    code = textwrap.dedent(HEAD) + textwrap.dedent(FORGETFUL[way])
    quiet = ["-W", "ignore:This process:DeprecationWarning"]
    assert program(code, tmp_path / "cache", size, options=quiet) == (0, "done\n", "")
    # It was closed, not just left: what was recorded is in the file.
    assert (tmp_path / "cache.trace").stat().st_size > 300
    keys = [bytes([number]) * 32 for number in range(32)]
    config = small(tmp_path / "cache", 64, 512, chunk_bytes=size)
    with kvstore.open_sync(config) as store:
        assert "lane-0" in store.description
        # What had reached the disk is there.
        assert store.resolve(keys) == 32


def test_an_interpreter_that_ends_while_its_disk_does_not_answer_ends_in_peace(
    tmp_path: Path,
) -> None:
    code = """
        from kvstore.tiers.disk import DiskTier
        import asyncio, kvstore.api.sync
        kvstore.api.sync.EXIT_SECONDS = 0.2

        async def never(self, *args):
            await asyncio.sleep(3600)

        DiskTier.write = never
        store = kvstore.open_sync(config)
        store.put(keys, buffers)
        print("done")
    """
    code = textwrap.dedent(HEAD) + textwrap.dedent(code)
    ended = program(code, tmp_path / "cache", 4096, options=["-X", "dev"])
    assert ended == (0, "done\n", "")


def test_a_store_that_is_forgotten_lets_go(tmp_path: Path, open_sync: Open) -> None:
    store: SyncStore | None = kvstore.open_sync(small(tmp_path / "cache", disk=64))
    assert store is not None
    store.put(KEYS, payloads(KEYS))
    assert len(own_threads()) == 1
    store = None
    gc.collect()
    until(lambda: not own_threads())
    with open_sync(disk=64) as again:
        assert "lane-0" in again.description


def test_a_lease_keeps_the_store_that_nobody_else_holds(tmp_path: Path) -> None:
    store: SyncStore | None = kvstore.open_sync(small(tmp_path / "cache"))
    assert store is not None
    store.put(KEYS, payloads(KEYS))
    lease, windows = store.get(KEYS), store.windows(KEYS, 2)
    store = None
    gc.collect()
    with lease as chunks:
        assert [bytes(chunk) for chunk in chunks] == payloads(KEYS)
    del lease, chunks
    gc.collect()
    with windows:
        assert [bytes(each) for chunks in windows for each in chunks] == payloads(KEYS)
