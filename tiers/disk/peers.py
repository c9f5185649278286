"""Peer lanes: read the lanes of other processes, so that replicas share one warm cache.

The owners are never asked and never disturbed. What their lanes hold is
learned from the index tensors: records are self-validating, and what is read
is verified against the record that was there just before, so a slot that its
owner rewrites meanwhile is a miss and nothing worse. A chunk that several lanes
keep is read from any of them that still has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvstore.concurrency import Daemons
from kvstore.errors import KVStoreError
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.disk.extents import Extent, Reading
from kvstore.tiers.disk.places import Places
from kvstore.tiers.disk.threads import Parts
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.volume import Job, Volume
from kvstore.tiers.disk.watch import SLOTS_PER_SEGMENT, Watch
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import Changes, RecoveredTier

__all__ = ["PeerLanes"]

PORTION = 1024
"""Changes that are told at once, about as many as one step of a look finds."""

STEPS = 16
"""Steps of a look that are made in one go."""


class _Known:
    """All that is known of other lanes: a watch for each path, and where each key lies.

    Segments of path p have the numbers p, p + n, p + 2n, n being the number of paths.
    """

    def __init__(self, volumes: Sequence[Volume], namespace: str, epoch: int) -> None:
        self.places = Places()
        self.watches = [
            Watch(
                volume,
                namespace,
                itertools.count(index, len(volumes)),
                self.places,
                epoch,
            )
            for index, volume in enumerate(volumes)
        ]
        self.looks: deque[tuple[Volume, Iterator[None]]] = deque()
        """Looks of this round that have not ended, by whose threads."""

    def begin_looks(self, volumes: Sequence[Volume]) -> None:
        """Begin to look everywhere, unless the round before has not ended."""
        if not self.looks:
            looks = (watch.look() for watch in self.watches)
            self.looks.extend(zip(volumes, looks, strict=True))

    def look_on(self, steps: Iterator[None]) -> tuple[bool, Changes]:
        """Look on for a moment: whether there is more to look at, and what was found. May block."""
        for count, _ in enumerate(steps, 1):
            if count == STEPS or self.places.changed >= PORTION:
                return True, self.places.changes()
        return False, self.places.changes()


class PeerLanes(Tier):
    """The lanes beside the one that `own` writes to; read only.

    Args:
        own: an open disk tier; its namespace is followed and its threads are used, those
            of each path for the lanes on that path.
    """

    is_peer = refreshes = True

    def __init__(self, own: DiskTier) -> None:
        self._own = own
        self._volumes: list[Volume] = []
        self._known = _Known([], "", 0)

    def open(self, region: PinnedRegion) -> RecoveredTier:
        self._region = region
        self._volumes = list(self._own.volumes)
        self._known = self._of_epoch()
        for watch in self._known.watches:
            for _ in watch.look():
                pass
        return RecoveredTier(
            name=f"{self._own.name}:others",
            medium="disk",
            entries=self._known.places.all(),
            segment_slots=SLOTS_PER_SEGMENT,
            segments=(),
            max_segments=0,
            payload_bytes=self._own.geometry.chunk_bytes,
        )

    @property
    def name(self) -> str:
        """How the lanes are called in the log."""
        return f"other lanes of {self._own.name}"

    @property
    def description(self) -> str:
        lanes = sum(watch.lanes for watch in self._known.watches)
        return f"{lanes} lanes of other processes"

    # -- reading -------------------------------------------------------------------------

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        known, places = self._known, list(slots)
        job = Job(keys, places, rows, [False] * len(keys), load=True)
        told: str | None = None
        tried: dict[int, set[int]] = {}
        again: Sequence[int] = range(len(keys))
        while again:
            error = await self._read_at(known, job, again)
            told = told or error
            # What its owner has rewritten may lie elsewhere too.
            again = []
            for index in (index for index, ok in enumerate(job.ok) if not ok):
                seen = tried.setdefault(index, {slots[index]})
                place = next((p for p in known.places.of(keys[index]) if p not in seen), None)
                if place is not None:
                    seen.add(place)
                    places[index] = place
                    again.append(index)
        unread = sorted(index for index in job.unread if not job.ok[index])
        return Transfer(job.ok, None if all(job.ok) else told, unread)

    async def _read_at(self, known: _Known, job: Job, indices: Sequence[int]) -> str | None:
        """Read those keys of `job` that `indices` name, each by its path's threads.

        Returns what went wrong first.
        """
        wanted = np.array(indices)
        paths = np.array(job.slots, np.int64)[wanted] // SLOTS_PER_SEGMENT % len(self._volumes)

        def cut(
            volume: Volume, watch: Watch, share: Sequence[int]
        ) -> list[Callable[[], Parts[str | None]]]:
            size, threads = volume.geometry.slot_bytes, volume.threads.count
            batches = job.batches(share, SLOTS_PER_SEGMENT, size, threads)
            return [partial(self._read_batch, job, volume, watch, batch) for batch in batches]

        # Whatever one of them raises: the rows are theirs until all have ended.
        outcomes = await asyncio.gather(
            *(
                volume.threads.run_cut(
                    partial(cut, volume, watch, wanted[paths == index].tolist()), load=True
                )
                for index, (volume, watch) in enumerate(
                    zip(self._volumes, known.watches, strict=True)
                )
                if (paths == index).any()
            ),
            return_exceptions=True,
        )
        told: str | None = None
        for outcome in outcomes:
            if isinstance(outcome, TimeoutError):
                told = told or str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                told = told or next((error for error in outcome if error is not None), None)
        return told

    def _read_batch(
        self, job: Job, volume: Volume, watch: Watch, batch: Sequence[Sequence[int]]
    ) -> Parts[str | None]:
        reached: list[tuple[int, Sequence[int]]] = []
        wanted: list[Extent] = []
        for indices in batch:
            number, first = divmod(job.slots[indices[0]], SLOTS_PER_SEGMENT)
            segment = watch.find(number)
            if segment is None:
                continue  # The segment is gone; so are its chunks.
            reached.append((number, indices))
            wanted.append(job.extent(segment, first, indices, self._region))
        reading = Reading(volume.backend, wanted, volume.coder)
        if reading.waits:
            yield
        told: str | None = None
        each = zip(reached, wanted, reading.end(), strict=True)
        for (number, indices), extent, outcome in each:
            for slot, (index, ok) in enumerate(zip(indices, outcome.ok, strict=True), extent.first):
                job.ok[index] = ok
                if slot in outcome.wrong:
                    # That an owner rewrote a slot is its right, not an error.
                    watch.note_wrong(number, slot, job.keys[index])
                elif not ok:
                    job.unread.add(index)
                    told = told or outcome.error
        return told

    # -- what a tier that is only read refuses ---------------------------------------------

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return Transfer([False] * len(keys), "lanes of other processes are not written to")

    async def grow(self) -> tuple[int | None, str | None]:
        return None, "lanes of other processes do not grow"

    # -- following -----------------------------------------------------------------------

    async def clear(self) -> list[int] | str:
        """Forget what others hold, but for what is of the epoch that the own lane has moved to.

        The caller clears the own tier first.
        """
        await self._forget(self._of_epoch())
        return []

    async def refresh(self) -> Changes:
        known = self._known
        known.begin_looks(self._volumes)
        while known.looks:
            volume, steps = known.looks[0]
            more, found = False, Changes()
            try:
                # The thread puts the portion together: nothing is left to do on the loop.
                more, found = await volume.threads.run(partial(known.look_on, steps))
            except TimeoutError:
                pass
            finally:
                if not more:
                    known.looks.popleft()
            if known is not self._known:
                # What was seen before the tier was cleared is not news any more.
                return Changes()
            if found:
                return found
        return Changes()

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        await self._forget(_Known([], "", 0))

    def abandon(self) -> None:
        self._known = _Known([], "", 0)

    def _of_epoch(self) -> _Known:
        return _Known(self._volumes, self._own.namespace_digest, self._own.epoch)

    async def _forget(self, known: _Known) -> None:
        """Know only what `known` does from now on."""
        before = [self._known]
        self._known = known
        # Segments close their files when the last that uses them has ended: not on the loop, whose
        # own threads may be busy with calls that wait for the store.
        try:
            await asyncio.wrap_future(Daemons("kvstore-peers").submit(before.clear))
        except KVStoreError:
            # No thread can be started any more, as when the interpreter ends.
            before.clear()
