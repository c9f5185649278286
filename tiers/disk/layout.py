"""How well the chunks of a lane lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import ForeignFileError
from tiers.disk.format import Geometry
from tiers.disk.index import read_index
from tiers.disk.segment import segment_files

__all__ = ["LaneLayout", "lane_layout", "layout_of"]


@dataclass(slots=True)
class LaneLayout:
    """How well the chunks of a lane lie.

    Attributes:
        segments: segment files.
        file_bytes: their size together.
        slots: slots they have.
        live: slots that hold a chunk.
        extents: runs of chunks that follow each other in order and in place.
        needed: segments that would do for the live chunks.
    """

    segments: int
    file_bytes: int
    slots: int
    live: int
    extents: int
    needed: int

    @property
    def chunks_per_extent(self) -> float:
        """Mean length of a run: how many chunks one read can fetch."""
        return self.live / self.extents if self.extents else 0.0


def layout_of(slots: Sequence[int], segments: int, geometry: Geometry) -> LaneLayout:
    """The layout of a lane with so many segments, whose chunks in order lie in `slots`."""
    extents = sum(
        1
        for index, slot in enumerate(slots)
        if not index
        or abs(slot - slots[index - 1]) != 1
        or not max(slot, slots[index - 1]) % geometry.slots
    )
    return LaneLayout(
        segments,
        segments * geometry.file_bytes,
        segments * geometry.slots,
        len(slots),
        extents,
        -(-len(slots) // geometry.slots),
    )


def lane_layout(folder: Path) -> LaneLayout:
    """The layout of a lane, read without taking it: it may be in use.

    Segments that cannot be read are left out.
    """
    geometry: Geometry | None = None
    slots: list[int] = []
    sequences: list[int] = []
    segments = 0
    for number, path in segment_files(folder):
        try:
            header, live, _ = read_index(path)
        except (ForeignFileError, OSError):
            continue
        geometry = geometry or header.geometry
        segments += 1
        slots += [number * header.geometry.slots + slot for slot in live.slots]
        sequences += live.records["sequence"].tolist()
    if geometry is None:
        return LaneLayout(0, 0, 0, 0, 0, 0)
    order = np.argsort(np.array(sequences, np.uint64), kind="stable").tolist()
    return layout_of([slots[index] for index in order], segments, geometry)
