"""Reading the index of a segment that somebody else may be writing to."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tiers.disk.format import (
    ALIGN,
    RECORD,
    RECORD_BYTES,
    Header,
    LiveRecords,
    decode_records,
    parse_header,
    segment_seed,
)

__all__ = ["read_index"]

PIECE_SLOTS = 65_536
"""Records read at once."""


def read_index(path: Path) -> tuple[Header, LiveRecords, int]:
    """The header and the valid records of a segment, and the size of the file.

    Raises:
        ForeignFileError: if it is not a segment.
        OSError: as the system says.
    """
    # A pipe in its place must not hold anybody up.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        header = parse_header(os.pread(fd, ALIGN, 0), str(path))
        geometry = header.geometry
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
