"""Transfers of Mooncake that are given up: what they had begun touches no row of anybody else's."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.mooncake import MooncakeTier
from kvstore.tiers.remote.session import Session
from kvstore.tiers.remote.tier import GONE
from kvstore.types import TierPlace
from tests.patience import PATIENCE, until, until_async

THREAD = "kvstore-client"

ROOT = Path(__file__).resolve().parents[3]


class Engine:
    """What the engine's calls do, with a transfer that goes on after it was given up.

    The real one does so after a minute over a slow wire: `slow_wire.py`.
    """

    made: list[Engine]
    code = -800

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.wrote = threading.Event()
        self.contributed = 0
        self.made.append(self)

    def setup(self, host: str, metadata: str, contributed: int, *_: Any) -> int:
        self.contributed = contributed
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        assert not self.closed.is_set(), "the real one would crash"
        return [1] * len(names)

    def batch_get_into_multi_buffers(
        self, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        assert not self.closed.is_set(), "the real one would crash"

        def go_on() -> None:
            while not self.closed.wait(0.001):
                for slices in zip(addresses, sizes, strict=True):
                    for address, size in zip(*slices, strict=True):
                        ctypes.memset(address, 0x11, size)
                self.wrote.set()

        self.thread = threading.Thread(target=go_on)
        self.thread.start()
        return [self.code] * len(names)

    def close(self) -> None:
        self.closed.set()
        if self.wrote.is_set():
            self.thread.join()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """All that were made; what they fail at they have given up."""
    Engine.made = []
    monkeypatch.setattr("kvstore.tiers.remote.mooncake.GIVEN_UP_SECONDS", 0.0)
    monkeypatch.setattr("kvstore.tiers.remote.mooncake.Engine", Engine)
    monkeypatch.setattr("kvstore.tiers.remote.mooncake._own_address", lambda master: "127.0.0.1")
    return Engine.made


@pytest.mark.parametrize("tail_bytes", [0, 4096])
async def test_a_read_that_was_given_up_writes_to_no_row_after_it_has_ended(
    engines: list[Engine], tail_bytes: int
) -> None:
    tier = MooncakeTier(TierPlace("given up", {}, 8192))
    bench = TierBench(tier, 4, 8192, 8192, tail_bytes)
    keys = [key_of(number) for number in range(4)]
    for _ in range(3):
        assert await bench.fetch(keys, [0] * 4) == [False] * 4
        before = bytes(bench.region.view)
        time.sleep(0.02)
        assert bytes(bench.region.view) == before
    # Each time there was a new one, and questions are answered.
    assert len(engines) == 3
    assert (await tier.holds([*keys, key_of(4)])).ok == [False] * 4 + [True]
    await bench.close()
    assert all(engine.closed.is_set() for engine in engines)


async def test_what_this_host_gives_to_the_pool_stays_when_a_transfer_is_given_up(
    engines: list[Engine],
) -> None:
    bench = TierBench(
        MooncakeTier(TierPlace("given", {}, 8192), contribute_bytes=64), 4, 8192, 8192
    )
    for _ in range(3):
        assert await bench.fetch([key_of(1)], [0]) == [False]
    giver, *movers = engines
    assert giver.contributed == 64
    assert not giver.closed.is_set()
    assert [mover.contributed for mover in movers] == [0] * 3
    await bench.close()
    assert giver.closed.is_set()


@pytest.mark.parametrize(
    ("code", "given_up_s"),
    [
        pytest.param(-704, 0.0, id="there is no such value"),
        pytest.param(-703, 0.0, id="another process is storing it"),
        pytest.param(-900, 0.0, id="the master was not reached"),
        # As where the host of a value is dead: to end an engine stops all threads for a second.
        pytest.param(-800, 30.0, id="it failed at once"),
    ],
)
async def test_a_read_that_was_not_given_up_ends_nothing(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, code: int, given_up_s: float
) -> None:
    def answer(self: Engine, names: Sequence[str], *_: Any) -> list[int]:
        return [code] * len(names)

    monkeypatch.setattr("kvstore.tiers.remote.mooncake.GIVEN_UP_SECONDS", given_up_s)
    monkeypatch.setattr(Engine, "batch_get_into_multi_buffers", answer)
    bench = TierBench(MooncakeTier(TierPlace("answered", {}, 8192)), 4, 8192, 8192)
    for _ in range(3):
        assert await bench.fetch([key_of(1)], [0]) == [False]
    (engine,) = engines
    assert not engine.closed.is_set()
    await bench.close()


async def test_a_transfer_that_takes_longer_than_a_question_may_is_waited_for(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: Engine, names: Sequence[str], *_: Any) -> list[int]:
        time.sleep(0.3)
        return [-704] * len(names)

    monkeypatch.setattr(Engine, "batch_get_into_multi_buffers", late)
    bench = TierBench(MooncakeTier(TierPlace("late", {}, 8192), timeout_s=0.1), 4, 8192, 8192)
    moves = [bench.tier.read([key_of(number)], [0], [number]) for number in range(4)]
    for done in await asyncio.gather(*moves):
        assert (done.error, list(done.unread)) == (GONE, [])
    await bench.close()


@pytest.mark.parametrize("code", [-703, -704])
async def test_a_value_that_is_not_there_yet_is_no_bad_one(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A bad one counts as missing for minutes, and is removed before it is stored again."""
    monkeypatch.setattr(Engine, "batch_get_into_multi_buffers", lambda *_: [code])
    bench = TierBench(MooncakeTier(TierPlace("not ready", {}, 8192)), 4, 8192, 8192)
    done = await bench.tier.read([key_of(1)], [0], [0])
    assert (done.ok, done.error) == ([False], GONE)
    assert (await bench.tier.holds([key_of(1)])).ok == [True]
    await bench.close()


# -- its end -------------------------------------------------------------------------------------


async def test_an_engine_is_not_closed_before_the_last_question_has_left_it(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, crashed = threading.Event(), []

    def hang(self: Engine, names: Sequence[str]) -> list[int]:
        answers.wait(PATIENCE)
        crashed.append(self.closed.is_set())
        return [1] * len(names)

    monkeypatch.setattr(Engine, "batch_is_exist", hang)
    monkeypatch.setattr("kvstore.tiers.remote.mooncake.QUESTION_SECONDS", 0.01)
    bench = TierBench(MooncakeTier(TierPlace("asked", {}, 8192), timeout_s=0.05), 4, 8192, 8192)
    for _ in range(2):
        assert "no answer" in ((await bench.tier.holds([key_of(1)])).error or "")
    await bench.close()
    (engine,) = engines
    assert not engine.closed.is_set()
    answers.set()
    assert engine.closed.wait(PATIENCE)
    assert crashed == [False, False]


async def test_what_is_still_being_connected_when_it_is_closed_is_closed_too(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    register = Engine.register_buffer

    def slow(self: Engine, address: int, size: int) -> int:
        goes_on.wait(PATIENCE)
        return register(self, address, size)

    monkeypatch.setattr(Engine, "register_buffer", slow)
    tier = MooncakeTier(TierPlace("begun", {}, 8192), contribute_bytes=64, timeout_s=0.05)
    bench = TierBench(tier, 4, 8192, 8192)
    assert "no answer" in ((await tier.holds([key_of(1)])).error or "")
    await bench.close()
    goes_on.set()
    giver, mover = engines
    assert giver.closed.wait(PATIENCE)
    assert mover.closed.wait(PATIENCE)


async def test_a_client_whose_closing_is_cancelled_closes_everything(engines: list[Engine]) -> None:
    region = PinnedRegion.private(4, 8192, 4096)
    tier = MooncakeTier(TierPlace("cancelled", {}, 8192), contribute_bytes=64)
    tier.open(region)
    assert (await tier.holds([key_of(1)])).ok == [True]
    client = tier._reached()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [engine.closed.is_set() for engine in engines] == [True, True]
    assert region.claim_tails()
    tier.abandon()
    region.close()


async def test_a_connection_that_failed_while_nobody_waited_is_tried_again_and_told_nowhere(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    def refuses(master: str) -> str:
        goes_on.wait(PATIENCE)
        raise StoreError("the master is gone")

    tier = MooncakeTier(TierPlace("tried", {}, 8192), timeout_s=0.05)
    bench = TierBench(tier, 4, 8192, 8192)
    with monkeypatch.context() as dead:
        dead.setattr("kvstore.tiers.remote.mooncake._own_address", refuses)
        assert "no answer" in ((await bench.tier.holds([key_of(1)])).error or "")
        goes_on.set()
        await until_async(lambda: not [t for t in threading.enumerate() if t.name == THREAD])
    tier._timeout = PATIENCE
    assert (await bench.tier.holds([key_of(1)])).ok == [True]
    await bench.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


# -- a session -----------------------------------------------------------------------------------


class Closing:
    """Tells when it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_session_ends_once_when_its_last_user_is_done() -> None:
    engine = Closing()
    session = Session(engine)
    with ThreadPoolExecutor() as threads:
        with session.used() as used:
            assert used is engine
            ends = [threads.submit(session.end) for _ in range(4)]
            until(lambda: session.ends)
            time.sleep(0.05)
            assert not engine.closed
            assert not any(end.done() for end in ends)
        for end in ends:
            end.result(PATIENCE)
    assert engine.closed == 1


def test_a_session_that_ends_takes_nobody_in() -> None:
    session = Session(Closing())
    session.end()
    with pytest.raises(StoreError, match="the connection is closing"), session.used():
        raise AssertionError


def test_a_session_that_does_not_wait_for_its_users_is_ended_by_the_last_of_them() -> None:
    engine = Closing()
    session = Session(engine)
    with session.used():
        with session.used():
            session.end(0.01)
            session.end(0.01)
        closed = engine.closed
        assert not closed
    assert engine.closed == 1


def test_an_engine_that_cannot_be_closed_has_ended_all_the_same() -> None:
    class Broken:
        def close(self) -> None:
            raise RuntimeError("broken")

    session = Session(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        session.end()
    session.end()


# -- the real one --------------------------------------------------------------------------------


@pytest.mark.slow
def test_over_a_wire_on_which_reads_are_given_up_no_wrong_byte_is_served() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    alone = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
    if not (shutil.which("tc") and run([*alone, "true"]).returncode == 0):
        pytest.skip("no network namespace of its own can be had, or there is no tc")
    program = f"ip link set lo up && exec {sys.executable} {ROOT}/tests/tiers/remote/slow_wire.py"
    told = run([*alone, "sh", "-c", program], timeout=280)
    assert "wrong: 0\n" in told.stdout, told.stderr[-2000:]


def run(command: list[str], timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
