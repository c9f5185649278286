"""Reading the index of a segment that somebody else may be writing to."""

from __future__ import annotations

import os
from pathlib import Path

from tiers.disk.format import RECORD_BYTES, Header, LiveRecords, decode_records, segment_seed
from tiers.disk.segment import read_header

__all__ = ["read_index"]


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
        wanted = min(geometry.slots * RECORD_BYTES, max(0, size - geometry.index_offset))
        raw = os.pread(fd, wanted, geometry.index_offset)
    finally:
        os.close(fd)
    raw = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES]
    seed = segment_seed(header.segment_id)
    return header, decode_records(raw, 0, geometry.chunk_bytes, seed), size
