"""Puts: copy chunks into host memory, each once, as far as there is room.

Puts are served in the order in which they came. A put larger than host memory is served in
portions, and queues again for each. The first in the queue waits for room: at most ``deadline_s``
while no put gets any, and at most ``max_wait_s`` in any case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvstore.api.lease import Onlookers
from kvstore.concurrency import in_thread, outlast
from kvstore.core import Core
from kvstore.core.chunk import FILLING
from kvstore.core.residency.base import CopyTarget
from kvstore.engine.loop_steps import Driver
from kvstore.tiers.pinned import PinnedRegion

__all__ = ["COPY_INLINE_BYTES", "Copies", "Puts", "copy_threads", "run_copy"]


class Copies:
    """The copies that wait or are under way when this object is created.

    Copies queued later do not count.
    """

    def __init__(self, core: Core, due: Iterable[tuple[CopyTarget, int, set[bytes]]]) -> None:
        self._chunks = core.chunks
        self._due = list(due)

    @classmethod
    def all(cls, core: Core) -> Copies:
        """Return the copies to every tier."""
        targets = core.targets
        return cls(core, [(t, t.copies_queued, t.unsaved_keys()) for t in targets])

    @classmethod
    def of(cls, core: Core, target: CopyTarget, keys: Iterable[bytes]) -> Copies:
        """Return the copies of `keys` to one tier."""
        return cls(core, [(target, 0, set(keys))])

    def ended(self) -> bool:
        """Whether all of them have arrived or will not arrive."""
        return all(self._arrived(*each) for each in self._due)

    def _arrived(self, tier: CopyTarget, mark: int, keys: set[bytes]) -> bool:
        if tier.copies_ended < mark:
            # The cheap test, which is enough most of the time.
            return False
        keys.intersection_update([key for key in keys if self._under_way(tier, key)])
        return not keys

    def _under_way(self, tier: CopyTarget, key: bytes) -> bool:
        chunk = self._chunks.get(key)
        waits = chunk is not None and chunk.unsaved >> tier.number & 1
        return bool(waits) or key in tier.index.writing


COPY_INLINE_BYTES = 256 * 1024
"""Copies up to this size are done on the loop: a thread would cost more."""


COPY_THREADS = 4


def copy_threads() -> ThreadPoolExecutor:
    """Return threads for the copies of one store.

    The loop's own executor may be full of calls that wait for the store.
    """
    return ThreadPoolExecutor(COPY_THREADS, "kvstore-copy")


async def run_copy(copy: Callable[[], None], size: int, threads: Executor) -> None:
    """Copy `size` bytes by `copy`, in one of `threads` if they are many.

    The copy has ended when this returns or raises, even if the task is cancelled.
    """
    if size > COPY_INLINE_BYTES:
        try:
            copying = in_thread(copy, threads)
        except RuntimeError:
            # There are no more threads, or the interpreter is shutting down.
            pass
        else:
            await outlast(copying)
            return
    copy()


Sources = dict[bytes, npt.NDArray[np.uint8]]


@dataclass(slots=True, eq=False)
class _Call:
    """One put.

    Attributes:
        name: its request. wait, durable: as of `Puts.put`. era: of the core, when it began.
        withdrawn: keys that were removed since it began. declined: keys that were not wanted.
        given_up: keys at which it found no room in time, and those behind them.
        reads: keys of chunks that were being read from a tier when they were looked at.
    """

    name: str
    wait: bool
    durable: bool
    era: int
    withdrawn: set[bytes] = field(default_factory=set)
    declined: set[bytes] = field(default_factory=set)
    given_up: set[bytes] = field(default_factory=set)
    reads: set[bytes] = field(default_factory=set)


class Puts:
    """Serves puts: see the module's text.

    Args:
        threads: make the copies.
        onlookers: what keeps rows for a time that nobody knows.
        deadline: seconds without movement after which a put gives up.
        max_wait: seconds after which it gives up in any case.
    """

    def __init__(
        self,
        core: Core,
        region: PinnedRegion,
        driver: Driver,
        threads: Executor,
        onlookers: Onlookers,
        *,
        deadline: float,
        max_wait: float,
    ) -> None:
        self._core = core
        self._region = region
        self._driver = driver
        self._threads = threads
        self._onlookers = onlookers
        self._deadline = deadline
        self._ceiling = max_wait
        self._turns: dict[int, asyncio.Lock] = {}
        """Those of each tenant, in the order of asking: see `Core.owner`."""
        self._moved = 0.0
        """When a put last got room."""
        self._calls: list[_Call] = []
        """The puts under way."""
        core.on_remove = self._withdraw

    @property
    def waiting(self) -> bool:
        """Whether a put waits for room."""
        return any(turn.locked() for turn in self._turns.values())

    async def put(
        self,
        keys: Sequence[bytes],
        sources: Sequence[npt.NDArray[np.uint8]],
        name: str,
        *,
        wait: bool,
        durable: bool = False,
    ) -> int:
        """Store `sources` under `keys` for the request `name`; returns the leading keys stored.

        Args:
            wait: whether to wait for room and for other puts.
            durable: whether `save` follows: what a peer keeps does not count, as it does not there.

        Raises:
            KVStoreError: if a close of the store begins meanwhile: it may not wait for all of it.
        """
        call = _Call(name, wait, durable, self._core.era)
        self._calls.append(call)
        try:
            await self._put(call, keys, sources)
            if wait and call.reads:
                lost = await self._lost(call, keys, sources)
                await self._put(call, [*lost], [*lost.values()])
        finally:
            self._calls.remove(call)
        self._driver.check_storing()
        self._count_refused(call)
        return next((n for n, key in enumerate(keys) if not self.has(key, own=durable)), len(keys))

    async def _put(
        self, call: _Call, keys: Sequence[bytes], sources: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """Store portion after portion, as far as there is room."""
        rows = min(self._rows_for(()), self._core.reach(keys))
        width = len(keys) if len(keys) <= rows else max(1, rows // 2)
        offered = 0
        here: list[bytes] = []  # stored by this call, and on no slower tier so far
        # Chunks from before a reset are not stored after it.
        while offered < len(keys) and call.era == self._core.era:
            self._driver.check_storing()
            here = [key for key in here if not self._core.may_go_below(key)]
            # A later part must not displace an earlier one.
            end = offered + min(width, self._rows_for(here) - len(here))
            part: Sources = {}
            for key, source in zip(keys[offered:end], sources[offered:end], strict=True):
                part.setdefault(key, source)
            if not part or not await self._portion(call, part):
                call.given_up.update(keys[offered:])
                break
            if call.durable:
                self._core.save_first(part)
            here += part
            offered = end

    def _count_refused(self, call: _Call) -> None:
        """Count what found no room, and is not being stored by another call either."""
        if call.era != self._core.era:
            return
        chunks, hidden = self._core.chunks, self._core.hidden
        lost = call.given_up - call.withdrawn - call.declined
        absent = (key for key in lost if key in hidden or key not in chunks)
        self._core.refuse(sum(not self.has(key) for key in absent))

    async def _lost(
        self, call: _Call, keys: Sequence[bytes], sources: Sequence[npt.NDArray[np.uint8]]
    ) -> Sources:
        """Wait until chunks are read, `deadline` at most; returns those that could not be."""
        # What stands behind a gap does not count.
        known = takewhile(lambda key: key in call.reads or self._is_there(key, call), keys)
        reads = call.reads.intersection(known)
        end = time.monotonic() + self._deadline
        while time.monotonic() < end and any(map(self._is_read, reads)):
            await self._driver.moved()
            self._driver.check_storing()
        lost: Sources = {}
        for key, source in zip(keys, sources, strict=True):
            if key in reads and not self._is_there(key, call):
                lost.setdefault(key, source)
        return lost

    async def save(self, keys: Sequence[bytes]) -> int:
        """Copy those of `keys` that are here to the first tier; returns how many it has, in order.

        Raises:
            KVStoreError: as `Driver.until`.
        """
        target = self._core.targets[0]
        self._core.save_first(keys)
        self._driver.pump()
        await self._driver.until(Copies.of(self._core, target, keys).ended)
        self._driver.check()
        hidden, held = self._core.hidden, target.entries
        # What a peer keeps on the same disk does not count: its owner may have removed it.
        return next(
            (count for count, key in enumerate(keys) if key in hidden or key not in held),
            len(keys),
        )

    def has(self, key: bytes, *, own: bool = False) -> bool:
        """Whether the store has the complete chunk; `own`: in host memory or on the first tier."""
        if key in self._core.hidden:
            return False
        chunk = self._core.chunks.get(key)
        return (chunk is not None and chunk.state != FILLING) or any(
            not tier.index.lacks(key)
            for tier in (self._core.targets[:1] if own else self._core.tiers)
        )

    def _is_here(self, key: bytes) -> bool:
        """Whether host memory has the chunk, or reads it."""
        chunk = self._core.chunks.get(key)
        if chunk is None or key in self._core.hidden:
            return False
        return chunk.state != FILLING or chunk.stored_by is None

    def _is_read(self, key: bytes) -> bool:
        """Whether the chunk is being read from a tier, and may yet turn out to be damaged."""
        chunk = self._core.chunks.get(key)
        return chunk is not None and chunk.state == FILLING and chunk.stored_by is None

    def _is_there(self, key: bytes, call: _Call) -> bool:
        """Whether no room is needed for the chunk."""
        return self._is_read(key) or self.has(key, own=call.durable)

    def _lacking(self, call: _Call, keys: Iterable[bytes]) -> dict[bytes, None]:
        """Those of `keys` that need room; notes which of the others are being read."""
        lacking: dict[bytes, None] = {}
        for key in keys:
            if self._is_read(key):
                call.reads.add(key)
            elif not self.has(key, own=call.durable):
                lacking[key] = None
        return lacking

    def _rows_for(self, keys: Sequence[bytes]) -> int:
        """Return the rows that are not pinned by keys other than `keys`."""
        return self._core.loadable_rows(frozenset(keys))

    def _is_full(self, keys: Sequence[bytes]) -> bool:
        """Whether no more of `keys` fit beside their head, what is pinned, and views."""
        # What is here behind the first one that is missing may make way for it.
        here = next((n for n, key in enumerate(keys) if not self._is_here(key)), len(keys))
        watched = self._onlookers.keys.difference(keys)
        return 0 < here >= self._rows_for([*keys, *watched]) - len(watched)

    def _withdraw(self, keys: Collection[bytes]) -> None:
        """Let no put under way store these keys, also those that wait for their turn."""
        for call in self._calls:
            call.withdrawn.update(keys)

    async def _portion(self, call: _Call, chunks: Sources) -> bool:
        """Store a part that fits in host memory; False if some of it found no room in time."""
        left = dict.fromkeys(chunks)
        since = time.monotonic()
        turn = self._turns.setdefault(self._core.owner(list(chunks)), asyncio.Lock())
        try:
            async with asyncio.timeout(self._ceiling if call.wait else 0.0):
                await turn.acquire()
        except TimeoutError:
            return False
        mine, again, told = True, False, False
        try:
            while True:
                now = self._driver.begin()
                if call.era != self._core.era:
                    return False
                left = {key: None for key in left if key not in call.withdrawn}
                if told:
                    left = self._lacking(call, left)
                if not left:
                    return True
                # Chunks that this call has stored and others have displaced are not stored again.
                pool = self._core.chunks
                withdrawn = call.withdrawn
                offered = [k for k in chunks if (k in left or k in pool) and k not in withdrawn]
                reach = self._core.reach(offered)
                if len(offered) > reach and all(map(self._core.may_go_below, chunks.keys() - left)):
                    # Its tenant has a smaller share by now: the rest is stored piece by piece.
                    offered = [key for key in offered if key in left][: max(1, reach // 2)]
                hidden = self._core.hidden
                if told and all(key in pool or key in hidden for key in left):
                    # They are still being removed. To be offered is a use, and what is used
                    # again and again is written to an exclusive tier again and again.
                    grant = None
                else:
                    grant = self._core.prepare_store(offered, call.name, patient=True)
                    told = told or grant is not None
                self._driver.flush()
                if grant is not None:
                    call.declined.update(grant.declined)
                    ended = {*grant.keys, *grant.declined}
                    left = self._lacking(call, (key for key in left if key not in ended))
                    done = not left
                    if grant.keys:
                        since = self._moved = now
                    if done:
                        # The next put need not wait for the copying.
                        turn.release()
                        mine = False
                    if grant.keys:
                        await self._copy_in(call, grant.keys, grant.rows, chunks)
                    if done:
                        return True
                    if grant.keys:
                        continue
                if not call.wait:
                    # A store that would fit later is offered again, to get what fits now.
                    if again:
                        return False
                    again = True
                    continue
                late = now - max(since, self._moved) >= self._deadline
                if late or now - since >= self._ceiling or self._is_full(offered):
                    return False
                await self._driver.moved()
        finally:
            if mine:
                turn.release()

    async def _copy_in(
        self, call: _Call, keys: list[bytes], rows: list[int], sources: Sources
    ) -> None:
        array = self._region.array

        def copy() -> None:
            for key, row in zip(keys, rows, strict=True):
                source = sources[key]
                np.copyto(array[row, : source.size], source)

        era = self._core.era
        ok = False
        try:
            await run_copy(copy, len(keys) * sources[keys[0]].size, self._threads)
            ok = True
        finally:
            self._core.complete_store(keys, call.name, ok, era)
            if call.durable and ok and era == self._core.era:
                # They may not leave before they are copied, though a peer keeps them.
                self._core.save_first(keys)
            self._driver.pump()
