"""The disk tier: chunks in slots of segment files, moved in extents."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvstore.errors import ConfigError, KVStoreError, PathUnusableError
from kvstore.types import TierOpening
from tiers.base import Tier, Transfer
from tiers.disk.extents import cut_extents, read_extent
from tiers.disk.format import Geometry, decode_records, encode_records, reseal_records
from tiers.disk.io import IOBackend, choose_backend
from tiers.disk.lane import Lane
from tiers.disk.namespace import Namespace
from tiers.disk.recovery import lane_geometry, recover
from tiers.disk.segment import Segment
from tiers.disk.threads import IOThreads
from tiers.pinned import PinnedRegion

__all__ = ["DiskTier"]

logger = logging.getLogger("kvstore.disk")

Outcome = tuple[list[bool], str | None]


class DiskTier(Tier):
    """One lane of one namespace on one path.

    Args:
        path: folder of the cache; made with mode 0700 if it does not exist.
        namespace: whose bytes they are.
        chunk_bytes: size of every chunk.
        capacity_bytes: hard limit for the files of the lane.
        segment_bytes: size of a segment file, at most.
        io: name of the I/O backend, or "auto".
        io_threads: threads that do I/O.
        lane: number of the lane; by default the first that is free.
    """

    def __init__(
        self,
        path: Path,
        namespace: Namespace,
        chunk_bytes: int,
        capacity_bytes: int,
        *,
        segment_bytes: int,
        io: str = "auto",
        io_threads: int = 4,
        lane: int | None = None,
    ) -> None:
        self._path = path
        self._namespace = namespace
        self._chunk_bytes = chunk_bytes
        self._capacity = capacity_bytes
        self._segment_bytes = segment_bytes
        self._io = io
        self.thread_count = io_threads
        self._lane_number = lane
        self._lane: Lane | None = None
        self._segments: dict[int, Segment] = {}
        self._reads: dict[int, npt.NDArray[np.uint32]] = {}
        self._read_ms: dict[int, npt.NDArray[np.uint64]] = {}
        self._sequence = 0
        self._max_segments = 0
        self._growth = threading.Lock()

    # -- opening -----------------------------------------------------------------------

    def open(self, region: PinnedRegion) -> TierOpening:
        slot_bytes = region.row_bytes
        wanted = Geometry.fitting(self._segment_bytes, slot_bytes, self._chunk_bytes)
        if not wanted.slots:
            smallest = Geometry(1, slot_bytes, self._chunk_bytes).file_bytes
            raise ConfigError(
                f"segment_bytes = {self._segment_bytes}: a segment must hold at least one chunk "
                f"of {self._chunk_bytes} bytes, so at least {smallest} bytes"
            )
        folder = self._namespace.establish(self._path)
        self._lane = Lane.acquire(folder, self._lane_number)
        try:
            return self._open_lane(self._lane, region, wanted)
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError) and not isinstance(error, KVStoreError):
                raise PathUnusableError(f"{self._lane.folder}: {error}") from error
            raise

    def _open_lane(self, lane: Lane, region: PinnedRegion, wanted: Geometry) -> TierOpening:
        digest = self._namespace.digest
        geometry = lane_geometry(lane.folder, digest, wanted)
        if self._capacity < geometry.file_bytes:
            way_out = "raise it or lower segment_bytes"
            if geometry != wanted:
                way_out = f"those in {lane.folder} have that size; raise it or remove them"
            raise ConfigError(
                f"capacity_bytes = {self._capacity}: smaller than one segment of "
                f"{geometry.file_bytes} bytes; {way_out}"
            )
        self.backend: IOBackend = choose_backend(lane.folder, self._io)
        recovered = recover(lane.folder, digest, geometry, self._capacity, self.backend)
        for reason in recovered.foreign:
            logger.warning("disk tier: left alone and counted against its capacity: %s", reason)
        if recovered.damaged:
            logger.warning(
                "disk tier: %d damaged records in %s; their chunks are gone",
                recovered.damaged,
                lane.folder,
            )
        self.geometry = geometry
        self._region = region
        self._segments = recovered.segments
        self._sequence = recovered.sequence
        room = max(0, self._capacity - recovered.foreign_bytes)
        self._max_segments = room // geometry.file_bytes
        if not self._segments and self._max_segments:
            try:
                self._new_segment()
            except OSError as error:
                raise PathUnusableError(
                    f"{lane.folder}: cannot allocate a segment of {geometry.file_bytes} bytes: "
                    f"{error.strerror}"
                ) from error
        for number in self._segments:
            self._add_counters(number)
        self.threads = IOThreads(self.thread_count, "kvstore-disk")
        return TierOpening(
            name=self.name,
            medium="disk",
            entries=recovered.entries,
            segment_slots=geometry.slots,
            segments=sorted(self._segments),
            max_segments=max(self._max_segments, len(self._segments)),
        )

    @property
    def name(self) -> str:
        """How the tier is called in logs and statistics."""
        return f"disk:{self._path}"

    @property
    def namespace_folder(self) -> Path:
        """The folder of the namespace, in which the lanes lie."""
        assert self._lane is not None
        return self._lane.folder.parent

    @property
    def namespace_digest(self) -> str:
        """What the segments of the namespace carry."""
        return self._namespace.digest

    @property
    def lane_number(self) -> int:
        """The lane that this process writes to."""
        assert self._lane is not None
        return self._lane.number

    @property
    def description(self) -> str:
        assert self._lane is not None
        geometry = self.geometry
        return (
            f"disk {self._lane.folder}, {self._max_segments} segments of {geometry.slots} chunks, "
            f"{self._max_segments * geometry.file_bytes} B, "
            f"I/O {self.backend.name} x{self.thread_count}"
        )

    # -- moving ------------------------------------------------------------------------

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._transfer(keys, slots, rows, load=True)

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._transfer(keys, slots, rows, load=False)

    async def _transfer(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int], *, load: bool
    ) -> Transfer:
        calls: list[Callable[[], Outcome]] = []
        extents = self._extents(slots)
        for extent in extents:
            segment = self._segments[slots[extent[0]] // self.geometry.slots]
            first = slots[extent[0]] % self.geometry.slots
            its_keys = [keys[index] for index in extent]
            its_rows = [rows[index] for index in extent]
            if load:
                calls.append(partial(self._read_extent, segment, first, its_keys, its_rows))
            else:
                sequence = self._sequence
                self._sequence += len(extent)
                calls.append(
                    partial(self._write_extent, segment, first, its_keys, its_rows, sequence)
                )
        ok = [False] * len(keys)
        errors: list[str] = []
        outcomes = await self.threads.run(calls, load=load)
        for extent, (extent_ok, error) in zip(extents, outcomes, strict=True):
            for index, one in zip(extent, extent_ok, strict=True):
                ok[index] = one
            if error is not None:
                errors.append(error)
        return Transfer(ok, "; ".join(errors) or None)

    def _extents(self, slots: Sequence[int]) -> list[list[int]]:
        geometry = self.geometry
        return cut_extents(slots, geometry.slots, geometry.slot_bytes, self.thread_count)

    def _write_extent(
        self,
        segment: Segment,
        first: int,
        keys: Sequence[bytes],
        rows: Sequence[int],
        sequence: int,
    ) -> Outcome:
        """Old records out, payload in, new records in: in this order, so that a crash
        between any two of them leaves slots that hold nothing."""
        buffers = [self._region.row(row) for row in rows]
        try:
            segment.erase_records(first, len(keys))
            self.backend.write(segment.data, buffers, segment.offset_of(first))
            size = self._chunk_bytes
            digests = [xxh3_128_digest(buffer[:size]) for buffer in buffers]
            segment.write_records(
                first, encode_records(keys, first, sequence, size, digests, segment.seed)
            )
        except OSError as error:
            if len(keys) == 1:
                return [False], f"write to {segment.path} slot {first}: {error.strerror or error}"
            return _one_by_one(
                partial(self._write_extent, segment, first + i, [key], [row], sequence + i)
                for i, (key, row) in enumerate(zip(keys, rows, strict=True))
            )
        return [True] * len(keys), None

    def _read_extent(
        self, segment: Segment, first: int, keys: Sequence[bytes], rows: Sequence[int]
    ) -> Outcome:
        buffers = [self._region.row(row) for row in rows]
        read = read_extent(self.backend, segment, first, keys, buffers)
        now = time.time_ns() // 1_000_000
        self._reads[segment.number][first : first + len(keys)] += np.array(read.ok, np.uint32)
        self._read_ms[segment.number][first : first + len(keys)] = now
        for slot in read.wrong:
            try:
                segment.erase_records(slot, 1)
            except OSError:
                logger.warning("cannot erase the record of slot %d of %s", slot, segment.path)
        return read.ok, read.error

    # -- the rest ----------------------------------------------------------------------

    async def grow(self) -> tuple[int | None, str | None]:
        (outcome,) = await self.threads.run([self._try_new_segment], load=False)
        if isinstance(outcome, str):
            return None, outcome
        return outcome, None

    async def clear(self) -> list[int] | None:
        (done,) = await self.threads.run([self._erase_all], load=False)
        return sorted(self._segments) if done else None

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        def finish() -> bool:
            try:
                self._save_recency(coldest_first)
            except OSError as error:
                logger.warning("disk tier: recency is not saved: %s", error.strerror)
            return True

        # A record that is written now would be lost between reading and writing the index.
        await self.threads.idle()
        try:
            await self.threads.run([finish], load=False)
        finally:
            if self.threads.close():
                self._close_files()
            else:
                logger.warning("disk tier: an I/O call does not return; its files stay open")

    def abandon(self) -> None:
        self.threads.close(1.0)
        self._close_files()

    def _try_new_segment(self) -> int | str:
        with self._growth:
            if len(self._segments) >= self._max_segments:
                return "the capacity is used up"
            try:
                number = self._new_segment()
            except OSError as error:
                return f"cannot allocate a segment: {error.strerror}"
            self._add_counters(number)
            return number

    def _new_segment(self) -> int:
        assert self._lane is not None
        number = 0
        while number in self._segments or os.path.lexists(
            self._lane.folder / f"segment-{number}.safetensors"
        ):
            number += 1
        self._segments[number] = Segment.create(
            self._lane.folder, number, self._namespace.digest, self.geometry, self.backend
        )
        return number

    def _add_counters(self, number: int) -> None:
        self._reads[number] = np.zeros(self.geometry.slots, np.uint32)
        self._read_ms[number] = np.zeros(self.geometry.slots, np.uint64)

    def _erase_all(self) -> bool:
        try:
            for segment in self._segments.values():
                segment.erase_records(0, self.geometry.slots)
        except OSError as error:
            logger.warning("disk tier: cannot erase %s: %s", segment.path, error.strerror)
            return False
        return True

    def _save_recency(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        """Give records sequences in order of recency, and the reads of this process."""
        slots = self.geometry.slots
        ranks: dict[int, dict[int, int]] = {number: {} for number in self._segments}
        for rank, (_, slot) in enumerate(coldest_first):
            if slot // slots in ranks:
                ranks[slot // slots][slot % slots] = self._sequence + rank
        for number, segment in self._segments.items():
            if not ranks[number]:
                continue
            raw = segment.read_records(0, slots)
            live = decode_records(raw, 0, self._chunk_bytes, segment.seed)
            records = live.records.copy()
            where = np.array(live.slots, np.intp)
            records["sequence"] = [
                ranks[number].get(slot, old)
                for slot, old in zip(live.slots, records["sequence"].tolist(), strict=True)
            ]
            records["reads"] += self._reads[number][where]
            read_ms = self._read_ms[number][where]
            records["read_ms"] = np.where(read_ms > 0, read_ms, records["read_ms"])
            whole = np.frombuffer(raw, records.dtype).copy()
            whole[where] = np.frombuffer(reseal_records(records, segment.seed), records.dtype)
            segment.write_records(0, whole.tobytes())
        self._sequence += len(coldest_first)

    def _close_files(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
        if self._lane is not None:
            self._lane.release()


def _one_by_one(calls: Iterable[Callable[[], Outcome]]) -> Outcome:
    ok: list[bool] = []
    errors: list[str] = []
    for call in calls:
        one_ok, error = call()
        ok += one_ok
        if error is not None:
            errors.append(error)
    return ok, "; ".join(errors) or None
