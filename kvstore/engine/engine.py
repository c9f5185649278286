"""Engine: run the core's moves on an asyncio loop and hand completions back.

One engine serves one core. It runs on the caller's own loop (`Engine`), or on a loop in one
background thread (`EngineThread`), with the same code. It belongs to the process that started it:
after a fork the child cannot use it. `end_engine` closes it, however often a loop that ends
cancels the waiting task.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvstore.concurrency import DETACH_SECONDS, LoopThread
from kvstore.core.reports import Complaints
from kvstore.errors import KVStoreError
from kvstore.observe.logs import warn_with
from kvstore.tiers.base import Tier
from kvstore.types import NO_MOVE, Changes, Completion, Move, Op, about

__all__ = ["Beside", "Engine", "EngineThread", "end_engine"]

logger = logging.getLogger("kvstore.engine")

FOLLOW_SECONDS = 0.5
"""How long it may take to notice chunks that others have stored, or that cannot be read now."""

MOST_AHEAD = 4
"""Most portions of changes that wait for the core; beyond that no more are read."""

TAKEN_SECONDS = 0.01
"""How often to check whether the core has taken one in."""

COMPANION_SECONDS = 5.0
"""Seconds that companions (`Beside`) get to end."""

UPKEEP_SECONDS = 5.0
"""After so many seconds upkeep is tried again that has failed."""


T = TypeVar("T")


class Beside(Protocol):
    """A companion: further work that runs on the engine's loop."""

    async def run(self) -> None:
        """Run until `stop` is called."""

    def stop(self) -> None:
        """Make `run` end soon. Called on the loop, perhaps twice."""


class Engine:
    """Runs moves on the loop on which it is used.

    All methods but `take` must be called on that loop. A move never raises: its
    completion reports what failed.

    Args:
        tiers: the open tiers, in the core's order.
        on_completion: called on the loop after completions were added for `take`.
        beside: what else runs on the loop until the engine is closed.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        on_completion: Callable[[], None],
        beside: Sequence[Beside] = (),
    ) -> None:
        self._tiers = tiers
        self._beside = beside
        self._on_completion = on_completion
        self._complaints = Complaints(warn_with(logger))
        self._done: deque[Completion] = deque()
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Moves under way, with the numbers of their tiers."""
        self._called: dict[int, str] = {}  # in the log, by their numbers
        self._followers: list[asyncio.Task[None]] = []
        self._companions: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()
        self.cut_off = False
        """Whether moves were cancelled: they will not be completed."""

    def start(self, moves: Sequence[Move]) -> None:
        """Begin `moves`, in this order."""
        if os.getpid() != self._pid:
            raise KVStoreError(f"this engine belongs to process {self._pid}")
        for move in moves:
            task = asyncio.get_running_loop().create_task(self._run(move))
            self._tasks[task] = move.tier
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        # Rows and slots of its move stay reserved: they may still be in use.
        self.cut_off |= task.cancelled()

    def begin(self) -> None:
        """Begin to follow the tiers that change without the core, and start the companions."""
        loop = asyncio.get_running_loop()
        self._companions = {loop.create_task(self._accompany(one)) for one in self._beside}
        for index, tier in enumerate(self._tiers):
            if tier.refreshes:
                self._followers.append(loop.create_task(self._follow(index, tier)))

    @property
    def stuck(self) -> bool:
        """Whether all moves that are left were cancelled: nothing will end any more."""
        return self.cut_off and not self._tasks

    @property
    def ended(self) -> bool:
        """Whether there are completions that were not taken yet."""
        return bool(self._done)

    def take(self) -> list[Completion]:
        """Take the completions that were not taken yet. May be called from any thread."""
        taken: list[Completion] = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    async def close(self, coldest_first: Sequence[Sequence[tuple[bytes, int]]]) -> None:
        """Wait for the moves under way, and close each tier when its own have ended.

        Args:
            coldest_first: for each tier its valid (key, slot) in order of recency.
        """
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        # Where one was cancelled its traceback keeps files of neighbours open.
        self._followers.clear()
        for one in self._beside:
            one.stop()
        if self._companions:
            await asyncio.wait(self._companions, timeout=COMPANION_SECONDS)
        # Side by side: one that does not answer keeps no other one open.
        closing = [
            asyncio.ensure_future(self._close_tier(number, tier, order))
            for number, (tier, order) in enumerate(zip(self._tiers, coldest_first, strict=True))
        ]
        try:
            await asyncio.gather(*closing)
        finally:
            for each in closing:
                each.cancel()
            await asyncio.gather(*closing, return_exceptions=True)

    async def _close_tier(
        self, number: int, tier: Tier, coldest_first: Sequence[tuple[bytes, int]]
    ) -> None:
        # Peers come after the tier beside which they lie, and are read by its threads.
        behind = itertools.takewhile(
            lambda at: self._tiers[at].is_peer, range(number + 1, len(self._tiers))
        )
        busy = {number, *behind}
        while its := [task for task, of in self._tasks.items() if of in busy]:
            await asyncio.wait(its)
        try:
            await tier.close(coldest_first)
        except BaseException as error:
            if _is_end(error):
                raise
            # A tier must not raise here either; the others must still be closed.
            logger.exception(
                "%s cannot be closed",
                _name_of(tier),
                extra=about("tier.not_closed", tier=_name_of(tier)),
            )

    async def detach(self) -> None:
        """Give up on calls that do not return, so that the loop can end.

        The memory of the rows must stay: such a call may still use it.
        """
        for tier in self._tiers:
            tier.detach()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=DETACH_SECONDS)

    async def _accompany(self, one: Beside) -> None:
        try:
            await one.run()
        except BaseException as error:
            if _is_end(error):
                raise
            # No call is served worse for it.
            logger.exception(
                "what runs beside the engine has ended", extra=about("engine.companion_ended")
            )

    async def _follow(self, index: int, tier: Tier) -> None:
        what = f"cannot learn what has changed in {_name_of(tier)}"
        ahead: deque[Changes] = deque()
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                while changes := await tier.refresh():
                    self._done.append(Completion(NO_MOVE, [], changes=changes, tier=index))
                    self._on_completion()
                    ahead.append(changes)
                    while len(ahead) >= MOST_AHEAD:
                        if ahead[0].taken:
                            ahead.popleft()
                        else:
                            await asyncio.sleep(TAKEN_SECONDS)
            except BaseException as error:
                if _is_end(error):
                    raise
                # Known entries are still right or fail their digests; the next try may succeed.
                told = self._complaints.failed(what, repr(error), time.monotonic())
                # What the system says is no fault of the tier.
                if told and not isinstance(error, OSError):
                    _tell_where(error)
                continue
            self._complaints.went_well(
                what, f"{_name_of(tier)}: changes are learned again", time.monotonic()
            )

    async def _run(self, move: Move) -> None:
        raised: BaseException | None = None
        try:
            completion = await self._perform(move)
            completion.check(len(move.keys))
        except BaseException as error:
            if _is_end(error):
                self.cut_off = True
                raise
            # A tier has no business raising, but the panic of a native client is no `Exception`;
            # its fault must still end the move. What the system says is no fault of the tier.
            places = range(len(move.keys))
            raised = None if isinstance(error, OSError) else error
            told = (str(error) if raised is None else "") or repr(error)
            completion = Completion(move.id, [False] * len(places), error=told, unread=places)
        self._tell(move, completion, raised)
        completion.ended = time.monotonic()
        self._done.append(completion)
        self._on_completion()

    def _tell(self, move: Move, completion: Completion, raised: BaseException | None) -> None:
        """Log faults, except those of copies, which the core logs itself."""
        number, tier = move.tier, self._tiers[move.tier]
        if number not in self._called:
            name = str(getattr(tier, "name", _name_of(tier).partition(", ")[0]))
            # Each by a name that no other has, so that none ends another's complaint.
            self._called[number] = f"{name} ({number})" if name in self._called.values() else name
        what, now = f"{move.op.value}, {self._called[number]}", time.monotonic()
        if completion.error is None:
            self._complaints.went_well(what, f"{what} works again", now)
            return
        if move.op is Op.CASCADE and raised is None:
            return
        failed = max(1, completion.ok.count(False))
        told = self._complaints.failed(what, completion.error, now, failed, tier=_name_of(tier))
        if told and raised is not None:
            _tell_where(raised)

    async def _perform(self, move: Move) -> Completion:
        tier = self._tiers[move.tier]
        if move.op is Op.PROMOTE:
            done = await tier.read(move.keys, move.slots, move.rows)
            return Completion(move.id, done.ok, error=done.error, unread=done.unread)
        if move.op is Op.CASCADE:
            done = await tier.write(move.keys, move.slots, move.rows)
            return Completion(move.id, done.ok, error=done.error, removed=done.removed)
        if move.op is Op.ASK:
            done = await tier.holds(move.keys)
            return Completion(move.id, done.ok, error=done.error, unread=done.unread)
        if move.op is Op.GROW:
            segment, error = await tier.grow()
            return Completion(move.id, [], [] if segment is None else [segment], error)
        if move.op is Op.RELOCATE:
            done = await tier.relocate(move.keys, move.slots, move.targets)
            return Completion(move.id, done.ok, error=done.error, unread=done.unread)
        if move.op is Op.LIST:
            return Completion(move.id, [], found=await tier.list_segment(move.segment))
        if move.op is Op.SHRINK:
            return Completion(move.id, [], error=await tier.remove_segment(move.segment))
        if move.op in (Op.NOTE, Op.ERASE):
            notes = move.op is Op.NOTE
            told = await (tier.note_uses(move.keys, move.slots) if notes else tier.erase(move.keys))
            return Completion(move.id, [told is None] * len(move.keys), error=told)
        emptied = await tier.clear()
        if not isinstance(emptied, list):
            return Completion(move.id, [], error=f"could not be cleared: {emptied}")
        return Completion(move.id, [], emptied)


class EngineThread:
    """An `Engine` on its own loop in one background thread.

    `submit`, `take` and `wait` are called from the thread that owns the core.
    They never wait for I/O, except `wait`, which waits as long as the caller says.
    """

    def __init__(self, tiers: Sequence[Tier], beside: Sequence[Beside] = ()) -> None:
        self._arrived = threading.Event()
        self._engine = Engine(tiers, self._arrived.set, beside)
        self._pid = os.getpid()
        self._closed = False
        self._thread = LoopThread("kvstore-engine", self)
        self._loop = self._thread.loop
        self._loop.call_soon_threadsafe(self._engine.begin)

    def submit(self, moves: Sequence[Move]) -> None:
        """Hand `moves` over: one wake-up for all of them."""
        if os.getpid() != self._pid:
            raise KVStoreError(f"this engine belongs to process {self._pid}")
        if self._closed:
            raise KVStoreError("this engine is closed")
        if moves:
            self._loop.call_soon_threadsafe(self._engine.start, moves)

    def tell(self, call: Callable[[T], None], what: T) -> None:
        """Make a call on the thread, after what was submitted before."""
        if not self._closed:
            self._loop.call_soon_threadsafe(call, what)

    @property
    def ended(self) -> bool:
        """Whether there are completions that were not taken yet."""
        return self._engine.ended

    def take(self) -> list[Completion]:
        """Take the completions that were not taken yet."""
        self._arrived.clear()
        return self._engine.take()

    def repeat(self, call: Callable[[], Callable[[], float] | None]) -> None:
        """Run a function repeatedly on the thread, until it is closed.

        Args:
            call: returns a function to run, or None once its owner is gone. The function
                returns after how many seconds to run it again.
        """

        def again() -> None:
            do = call()
            if do is None or self._closed:
                return
            seconds = UPKEEP_SECONDS
            try:
                seconds = do()
            except Exception:
                logger.exception(
                    "upkeep failed, and is tried again", extra=about("engine.upkeep_failed")
                )
            self._loop.call_later(seconds, again)

        self._loop.call_soon_threadsafe(again)

    def wait(self, seconds: float) -> bool:
        """Wait until there is a completion to take, at most `seconds`."""
        return self._arrived.wait(seconds)

    def close(
        self, coldest_first: Sequence[Sequence[tuple[bytes, int]]], timeout: float = 30.0
    ) -> bool:
        """Wait for the moves under way, close the tiers and end the thread.

        Returns:
            False if a tier did not answer within `timeout` seconds: it is left
            behind as it is, which is safe, only recency is not saved.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._engine.close(coldest_first), self._loop)
        try:
            closing.result(timeout)
            return True
        except TimeoutError:
            logger.warning(
                "a tier did not finish within %.0f s and is left behind",
                timeout,
                extra=about("tier.left_behind", seconds=timeout),
            )
            return False
        finally:
            self._thread.end()


def _name_of(tier: Tier) -> str:
    """Return the tier's description; one of others may fail even at that."""
    try:
        return tier.description
    except Exception:
        return type(tier).__name__


def _tell_where(error: BaseException) -> None:
    logger.error("it was raised here", exc_info=error, extra=about("engine.raised", error=error))


def _is_end(error: BaseException) -> bool:
    """Whether it ends the task, or the program, and is no fault of what was called."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


async def end_engine(
    engine: Engine, recency: Sequence[Sequence[tuple[bytes, int]]], seconds: float
) -> bool:
    """Close the engine and its tiers, or leave them behind after `seconds`.

    A loop that ends cancels every task once, this one too; it continues nevertheless.

    Args:
        recency: see `Engine.close`.

    Returns:
        Whether everything has ended. If not, rows may still be written to: the memory must stay.
    """
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + seconds
    closing = loop.create_task(engine.close(recency))
    while not await _ended(closing, deadline - time.monotonic()) or closing.cancelled():
        if not closing.done():
            logger.warning(
                "a tier does not answer and is left behind", extra=about("tier.left_behind")
            )
            await _ended(loop.create_task(engine.detach()), 2 * DETACH_SECONDS)
            await _ended(closing, DETACH_SECONDS)
            return False
        closing = loop.create_task(engine.close(recency))
    return True


async def _ended(task: asyncio.Future[None], seconds: float) -> bool:
    """Wait at most `seconds` for `task` to end, cancelled or not; returns whether it has."""
    end = time.monotonic() + seconds
    while not task.done() and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=left)
    return task.done()
