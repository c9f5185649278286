"""Reading the index of a segment that somebody else may be writing to."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tiers.disk.format import (
    RECORD,
    RECORD_BYTES,
    Header,
    LiveRecords,
    decode_records,
    segment_seed,
)
from tiers.disk.segment import read_header

__all__ = ["read_index"]

PIECE_SLOTS = 65_536
"""Records read at once."""


def read_index(path: Path) -> tuple[Header, LiveRecords, int]:
    """The header and the valid records of a segment, and the size of the file.

    Raises:
        ForeignFileError: if it is not a segment.
        OSError: as the system says.
    """
    header = read_header(path)
    geometry = header.geometry
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        # A header can claim any number of slots: read no more than the file has.
        slots = min(geometry.slots, max(0, size - geometry.index_offset) // RECORD_BYTES)
        seed = segment_seed(header.segment_id)
        parts: list[LiveRecords] = []
        for first in range(0, slots, PIECE_SLOTS):
            count = min(PIECE_SLOTS, slots - first)
            at = geometry.index_offset + first * RECORD_BYTES
            raw = os.pread(fd, count * RECORD_BYTES, at)
            raw = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES]
            parts.append(decode_records(raw, first, geometry.chunk_bytes, seed))
    finally:
        os.close(fd)
    live = LiveRecords(
        [slot for part in parts for slot in part.slots],
        np.concatenate([np.zeros(0, RECORD), *(part.records for part in parts)]),
        [slot for part in parts for slot in part.damaged],
    )
    return header, live, size
