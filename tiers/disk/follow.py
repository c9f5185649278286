"""Lanes of other processes, read beside their owners: many replicas, one warm cache.

The owners are never asked and never disturbed. What their lanes hold is
learned from the index tensors: records are self-validating, and what is read
is verified against the record that was there just before, so a slot that its
owner rewrites meanwhile is a miss and nothing worse.

Following is cheap: a segment whose modification time has not changed is not
read again, and of one that has changed only the records that differ are
decoded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import ForeignFileError
from kvstore.types import News, TierOpening
from tiers.base import Tier, Transfer
from tiers.disk.descriptors import allow_descriptors
from tiers.disk.extents import Extent, cut_batches, cut_extents, read_extents
from tiers.disk.format import RECORD, RECORD_BYTES, decode_records
from tiers.disk.io import IOBackend
from tiers.disk.lane import lane_folders
from tiers.disk.segment import Segment, read_header, segment_files
from tiers.disk.tier import DiskTier
from tiers.disk.volume import SPARE_DESCRIPTORS
from tiers.pinned import PinnedRegion

__all__ = ["FollowedLanes"]

logger = logging.getLogger("kvstore.disk")

SLOTS_PER_SEGMENT = 2**24
"""Places are numbered as if every followed segment had this many slots."""

SETTLED_SECONDS = 2.0
"""A file changed less than this ago may have changed again within its time stamp's grain."""


@dataclass(slots=True)
class _Followed:
    """A segment of another process, and what is known of its index."""

    number: int
    segment: Segment
    inode: int
    changed_ns: int
    checked_ns: int
    crcs: npt.NDArray[np.uint32]
    keys: dict[int, bytes]


class FollowedLanes(Tier):
    """The lanes beside the one that `own` writes to; read only.

    Args:
        own: an open disk tier; its namespace is followed, its threads are used.
    """

    follows = True

    def __init__(self, own: DiskTier) -> None:
        self._own = own
        self._followed: dict[Path, _Followed] = {}
        self._by_number: dict[int, _Followed] = {}
        self._place_of: dict[bytes, int] = {}
        self._next = 0
        self._not_before_ms = 0
        self._lock = threading.Lock()
        self._generation = 0

    def open(self, region: PinnedRegion) -> TierOpening:
        self._region = region
        self._backend: IOBackend = self._own.backend
        self._threads = self._own.volumes[0].threads
        news = self._look()
        return TierOpening(
            name=f"{self._own.name}:others",
            medium="disk",
            entries=news.appeared,
            segment_slots=SLOTS_PER_SEGMENT,
            segments=(),
            max_segments=0,
            followed=True,
        )

    @property
    def description(self) -> str:
        lanes = {path.parent for path in self._followed}
        return f"{len(lanes)} lanes of other processes"

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        ok = [False] * len(keys)
        extents = cut_extents(slots, SLOTS_PER_SEGMENT, self._region.row_bytes, self._threads.count)
        batches = cut_batches(extents, self._region.row_bytes, self._threads.count)

        def read_batch(batch: Sequence[Sequence[int]]) -> str | None:
            reached: list[Sequence[int]] = []
            wanted: list[Extent] = []
            for extent in batch:
                number, first = divmod(slots[extent[0]], SLOTS_PER_SEGMENT)
                followed = self._by_number.get(number)
                if followed is None:
                    continue  # The segment is gone; so are its chunks.
                reached.append(extent)
                wanted.append(
                    Extent(
                        followed.segment,
                        first,
                        [keys[index] for index in extent],
                        [self._region.row(rows[index]) for index in extent],
                    )
                )
            told: str | None = None
            for extent, outcome in zip(reached, read_extents(self._backend, wanted), strict=True):
                for index, one in zip(extent, outcome.ok, strict=True):
                    ok[index] = one
                # That an owner rewrote a slot is its right, not an error.
                if not outcome.wrong:
                    told = told or outcome.error
            return told

        told = await self._threads.run([partial(read_batch, batch) for batch in batches], load=True)
        return Transfer(ok, next((error for error in told if error is not None), None))

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return Transfer([False] * len(keys), "lanes of other processes are not written to")

    async def grow(self) -> tuple[int | None, str | None]:
        return None, "lanes of other processes do not grow"

    async def clear(self) -> list[int] | None:
        """Forget what others hold now; what they store from now on will be seen."""

        def forget() -> bool:
            self._not_before_ms = time.time_ns() // 1_000_000
            self._forget_all()
            return True

        await self._threads.run([forget], load=False)
        return []

    async def refresh(self) -> News:
        generation = self._generation
        (news,) = await self._threads.run([self._look], load=False)
        # What was seen before the tier was cleared is not news any more.
        return news if generation == self._generation else News()

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        self._forget_all()

    def abandon(self) -> None:
        self._forget_all()

    # -- following -----------------------------------------------------------------------

    def _forget_all(self) -> None:
        # Segments close their files when the last read that uses them has ended.
        with self._lock:
            self._generation += 1
            self._followed.clear()
            self._by_number.clear()
            self._place_of.clear()

    def _look(self) -> News:
        """Bring what is known up to date; returns what has changed."""
        with self._lock:
            return self._look_locked()

    def _look_locked(self) -> News:
        appeared: dict[bytes, int] = {}
        gone: set[bytes] = set()
        present: set[Path] = set()
        lanes: list[Path] = []
        trust = self._own.trust
        for volume in self._own.volumes:
            own = volume.lane.folder
            try:
                lanes += [folder for _, folder in lane_folders(own.parent, trust) if folder != own]
            except OSError as error:
                logger.debug("cannot follow other lanes: %s", error)
        for folder in lanes:
            with contextlib.suppress(OSError):
                for _, path in segment_files(folder):
                    present.add(path)
                    with contextlib.suppress(OSError, ForeignFileError):
                        self._look_at(path, appeared, gone)
        for path in self._followed.keys() - present:
            self._lose(path, gone)
        return News(list(appeared.items()), [key for key in gone if key not in self._place_of])

    def _look_at(self, path: Path, appeared: dict[bytes, int], gone: set[bytes]) -> None:
        stat = path.stat()
        followed = self._followed.get(path)
        if followed is not None and followed.inode != stat.st_ino:
            self._lose(path, gone)
            followed = None
        if followed is None:
            followed = self._begin(path, stat.st_ino)
            if followed is None:
                return
        settled = followed.checked_ns - followed.changed_ns > SETTLED_SECONDS * 1e9
        if settled and stat.st_mtime_ns == followed.changed_ns:
            return
        followed.checked_ns = time.time_ns()
        followed.changed_ns = stat.st_mtime_ns
        geometry = followed.segment.geometry
        raw = followed.segment.read_records(0, geometry.slots)
        records = np.frombuffer(raw, RECORD, len(raw) // RECORD_BYTES)
        crcs = np.zeros(geometry.slots, np.uint32)
        crcs[: len(records)] = records["crc"]
        (changed,) = np.nonzero(crcs != followed.crcs)
        followed.crcs = crcs
        first = followed.number * SLOTS_PER_SEGMENT
        for slot in changed.tolist():
            old = followed.keys.pop(slot, None)
            if old is not None and self._place_of.get(old) == first + slot:
                del self._place_of[old]
                gone.add(old)
                appeared.pop(old, None)
            live = decode_records(
                raw[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES],
                slot,
                geometry.chunk_bytes,
                followed.segment.seed,
            )
            if live.slots and live.records["stored_ms"][0] >= self._not_before_ms:
                (key,) = live.keys()
                followed.keys[slot] = key
                self._place_of[key] = appeared[key] = first + slot

    def _begin(self, path: Path, inode: int) -> _Followed | None:
        header = read_header(path)
        own = self._own.geometry
        same = (header.geometry.slot_bytes, header.geometry.chunk_bytes) == (
            own.slot_bytes,
            own.chunk_bytes,
        )
        if header.namespace != self._own.namespace_digest or not same:
            return None
        allow_descriptors(2 + SPARE_DESCRIPTORS, "following other lanes")
        segment = Segment.follow(path, header, self._backend, self._own.trust)
        followed = _Followed(
            self._next, segment, inode, 0, 0, np.zeros(header.geometry.slots, np.uint32), {}
        )
        self._next += 1
        self._followed[path] = followed
        self._by_number[followed.number] = followed
        return followed

    def _lose(self, path: Path, gone: set[bytes]) -> None:
        followed = self._followed.pop(path)
        self._by_number.pop(followed.number, None)
        first = followed.number * SLOTS_PER_SEGMENT
        for slot, key in followed.keys.items():
            if self._place_of.get(key) == first + slot:
                del self._place_of[key]
                gone.add(key)
