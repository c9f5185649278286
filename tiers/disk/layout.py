"""Layout of a lane: how many runs its chunks lie in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import ForeignFileError
from kvstore.tiers.disk.format import Geometry, LiveRecords
from kvstore.tiers.disk.index import read_index
from kvstore.tiers.disk.segment import segment_files

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


def layout_of(slots: Sequence[int], segments: int, geometry: Geometry) -> LaneLayout:
    """Return the layout of a lane with `segments` segments and its chunks, in order, in `slots`."""
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


def lane_layout(
    folder: Path,
    namespace: str,
    epochs: Collection[int],
    without: Collection[Path] = (),
) -> LaneLayout:
    """The layout of a lane, read without taking it: it may be in use.

    Segments that cannot be read, or are of another namespace, are left out.

    Args:
        namespace: its digest.
        epochs: chunks of others do not count.
        without: segments that are left out, too.
    """
    geometry: Geometry | None = None
    found: list[tuple[int, LiveRecords]] = []
    segments = 0
    for number, path in segment_files(folder):
        try:
            header, live, _ = read_index(path)
        except (ForeignFileError, OSError):
            continue
        if path in without or header.namespace != namespace:
            continue
        geometry = geometry or header.geometry
        segments += 1
        if len(live.slots):
            found.append((number * header.geometry.slots, live))
    if geometry is None:
        return LaneLayout(0, 0, 0, 0, 0, 0)
    slots: list[int] = []
    sequences: list[int] = []
    for first, live in found:
        counted = live.of_epoch(*epochs)
        slots += [first + slot for slot in counted.slots]
        sequences += counted.records["sequence"].tolist()
    order = np.argsort(np.array(sequences, np.uint64), kind="stable").tolist()
    return layout_of([slots[index] for index in order], segments, geometry)
