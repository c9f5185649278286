"""Index of a segment file: the one module that reads and writes records.

Records go through the page cache by plain calls, never through a mapping. A
thread that touches a mapping waits in a page fault while the file system is
frozen or its medium is slow, and a fault holds the lock of the whole address
space: every allocation of the process would wait behind it.

A write takes the file's write lock, which direct transfers of the same file
hold shared. With native AIO they hold it only until they are handed
over, so a record waits a few microseconds; with blocking calls (``direct``)
it waits for the transfers that run.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.concurrency import open_at_once
from kvstore.tiers.disk.format import (
    ALIGN,
    RECORD,
    RECORD_BYTES,
    Header,
    LiveRecords,
    Records,
    checksummed,
    decode_at,
    decode_records,
    live_chunks,
    parse_header,
    segment_seed,
    used_record,
)
from kvstore.tiers.disk.io.base import read_bytes

__all__ = ["IndexFile", "read_index"]

PIECE_SLOTS = 65_536
"""Records read at once."""

CHANGES_SLOTS = 1024
"""Records that are compared and decoded at once beside the work of others: about a millisecond."""

HEAD = 8
"""Bytes of a key that are compared first."""

Crcs = npt.NDArray[np.uint32]


class IndexFile:
    """The records of a segment, by slot. Takes over the descriptor `fd` and closes it.

    All calls may block. Another process may be writing to the file, but a record
    that is valid was written whole. Reading and writing raise OSError as the system
    says.
    """

    def __init__(self, fd: int, header: Header) -> None:
        self._fd = fd
        # A record that is erased for its key must not be another's by then.
        self._writing = threading.Lock()
        self._geometry = header.geometry
        self._seed = segment_seed(header.segment_id)

    # -- reading -----------------------------------------------------------------------

    def read(self, first: int, count: int) -> bytes:
        """The raw records of `count` slots from `first` on; fewer where the file ends."""
        return read_bytes(self._fd, count * RECORD_BYTES, self._offset(first))

    def live(self, first: int = 0, count: int | None = None) -> LiveRecords:
        """The valid and the damaged records of `count` slots from `first` on: of all, if None."""
        count = self._geometry.slots - first if count is None else count
        return _joined(
            decode_records(raw, at, self._geometry.record_length, self._seed)
            for at, raw in self._pieces(first, count)
        )

    def chunks(self, first: int, raw: bytes, epoch: int) -> dict[int, tuple[bytes, bytes]]:
        """Key and digest, or seal, by slot of the valid records of `epoch` in `raw`.

        Says the same as `live`, faster for the few records of an extent.
        """
        return live_chunks(raw, first, self._geometry.record_length, self._seed, epoch)

    def changes(self, known: Crcs, epoch: int) -> Iterator[tuple[list[int], LiveRecords]]:
        """Yield what has changed since the records had the CRCs `known`, which are updated.

        Yields:
            Slots whose records differ, ascending, and those of them that are valid and of `epoch`.
        """
        size, read = self._geometry.record_length, 0
        for first, raw in self._pieces(0, self._geometry.slots, CHANGES_SLOTS):
            records = np.frombuffer(raw, RECORD, len(raw) // RECORD_BYTES)
            read = first + len(records)
            crcs = records["crc"]
            (differ,) = np.nonzero(crcs != known[first:read])
            if len(differ):
                known[first:read] = crcs
                ours = differ[records["epoch"][differ] == epoch]
                live = decode_at(records[ours].tobytes(), ours + first, size, self._seed)
                # One that was being written is looked at again.
                known[live.damaged] = 0
                yield (differ + first).tolist(), live
        # Where the file ends early there is no record any more.
        gone = np.flatnonzero(known[read:]) + read
        if len(gone):
            known[read:] = 0
            yield gone.tolist(), decode_records(b"", read, size, self._seed)

    # -- writing -----------------------------------------------------------------------

    def write(self, first: int, records: bytes) -> None:
        """Write raw records from slot `first` on; when this returns they outlive the process."""
        with self._writing:
            self._write(first, records)

    def erase_keys(self, keys: Collection[bytes]) -> int:
        """Mark every slot as empty that has a record of one of `keys`; returns how many had.

        Others may be writing records meanwhile.
        """
        wanted = set(keys)
        heads = np.unique(np.array([_head(key) for key in wanted], np.uint64))
        erased = 0
        for first, raw in self._pieces(0, self._geometry.slots):
            records = np.frombuffer(raw, RECORD, len(raw) // RECORD_BYTES)
            found = np.ascontiguousarray(records["key"][:, :HEAD]).view(np.uint64)
            alike = np.isin(found[:, 0], heads)
            for slot in (np.flatnonzero(alike & (records["state"] != 0)) + first).tolist():
                with self._writing:
                    raw = self.read(slot, 1)
                    if len(raw) < RECORD_BYTES:
                        # The file was cut short meanwhile.
                        return erased
                    (record,) = np.frombuffer(raw, RECORD)
                    if record["key"].tobytes()[: int(record["key_length"])] in wanted:
                        self._write(slot, bytes(RECORD_BYTES))
                        erased += 1
        return erased

    def _write(self, first: int, records: bytes) -> None:
        offset = self._offset(first)
        done = os.pwrite(self._fd, records, offset)
        while done < len(records):
            count = os.pwrite(self._fd, records[done:], offset + done)
            if not count:
                raise OSError(errno.EIO, "not a byte was written, and no reason given")
            done += count

    def erase(self, first: int, count: int) -> None:
        """Mark slots as holding nothing."""
        self.write(first, bytes(count * RECORD_BYTES))

    def erase_slots(self, slots: list[int]) -> None:
        """Erase any slots, ascending. Most of them are in runs."""
        for run in np.split(np.array(slots, np.int64), np.flatnonzero(np.diff(slots) != 1) + 1):
            if len(run):
                self.erase(int(run[0]), len(run))

    def note_use(self, slot: int, key: bytes, sequence: int, now_ms: int, reads: int) -> bool:
        """Say in the record of a slot that its chunk was used now, and read so often since.

        Returns:
            Whether the slot has a valid record of `key`; else nothing is written.
        """
        with self._writing:
            record = used_record(self.read(slot, 1), slot, key, self._seed, sequence, now_ms, reads)
            if record is not None:
                self._write(slot, record)
            return record is not None

    def read_settled(self, first: int, count: int) -> bytes:
        """Do as `read`, while no thread of this process writes."""
        with self._writing:
            return self.read(first, count)

    def place(self, records: Records, slot: int) -> None:
        """Write one valid record of any segment into a slot of this one."""
        moved = records.copy()
        moved["slot"] = slot
        self.write(slot, checksummed(moved, self._seed))

    def rewrite(self, change: Callable[[list[int], Records], None]) -> None:
        """Change what the valid records say.

        Args:
            change: gets their slots and the records, which it may write into.
        """
        raw = self.read(0, self._geometry.slots)
        live = decode_records(raw, 0, self._geometry.record_length, self._seed)
        records = live.records.copy()
        change(live.slots, records)
        whole = np.frombuffer(raw, RECORD, len(raw) // RECORD_BYTES).copy()
        whole[live.slots] = np.frombuffer(checksummed(records, self._seed), RECORD)
        self.write(0, whole.tobytes())

    def close(self) -> None:
        """Close the file. What was written is kept by the system."""
        os.close(self._fd)

    # -- inside ------------------------------------------------------------------------

    def _offset(self, slot: int) -> int:
        return self._geometry.index_offset + slot * RECORD_BYTES

    def _pieces(
        self, first: int, count: int, most: int = PIECE_SLOTS
    ) -> Iterator[tuple[int, bytes]]:
        """Slots and their raw records, `most` at once; none of them cut off."""
        for at in range(first, first + count, most):
            wanted = min(most, first + count - at)
            raw = self.read(at, wanted)
            yield at, raw[: len(raw) // RECORD_BYTES * RECORD_BYTES]
            # A header can claim any number of slots: the file ends where it ends.
            if len(raw) < wanted * RECORD_BYTES:
                return


def read_index(path: Path) -> tuple[Header, LiveRecords, int]:
    """The header and the valid records of any segment file, and the size of the file.

    Raises:
        ForeignFileError: if it is not a segment.
        OSError: as the system says.
    """
    fd = open_at_once(path)
    try:
        header = parse_header(read_bytes(fd, ALIGN, 0), str(path))
        return header, IndexFile(fd, header).live(), os.fstat(fd).st_size
    finally:
        os.close(fd)


def _head(key: bytes) -> int:
    """The first bytes of a key as a number, as they lie in a record."""
    return int.from_bytes(key[:HEAD].ljust(HEAD, b"\0"), sys.byteorder)


def _joined(parts: Iterator[LiveRecords]) -> LiveRecords:
    pieces = list(parts)
    if len(pieces) == 1:
        return pieces[0]
    return LiveRecords(
        [slot for piece in pieces for slot in piece.slots],
        np.concatenate([np.zeros(0, RECORD), *(piece.records for piece in pieces)]),
        [slot for piece in pieces for slot in piece.damaged],
    )
