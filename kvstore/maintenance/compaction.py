"""Offline compaction of one lane: fewer files, chunks in order.

Chunks that were written or used one after the other are put into adjacent
slots, segment by segment: a segment is emptied into free slots elsewhere and
then filled with the next chunks in order. Segments that are empty at the end
are removed.

The disk tier opens the lane, the core's `Compactor` plans and the tier's own
moves copy, as while serving. So epochs, recovery and durability are the same:
a copy is on the medium before its source may be overwritten or removed, and a
crash or power cut at any moment leaves at least one valid copy of each chunk.
No space beyond the existing files is used. A chunk to be moved whose payload
does not match its digest is dropped; an encrypted one is copied as it is. Chunks that stay in place
are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.core.residency.owned import OwnedTier
from kvstore.engine.engine import EngineThread
from kvstore.errors import ForeignFileError
from kvstore.policies import create_policy
from kvstore.tiers.disk.epoch import read_epoch
from kvstore.tiers.disk.fault import Fault
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.layout import LaneLayout, lane_layout, layout_of
from kvstore.tiers.disk.namespace import Namespace, read_namespace
from kvstore.tiers.disk.recovery import held_geometry
from kvstore.tiers.disk.segment import read_header, segment_files
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.trust import STRICT, Trust
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import Completion, Move, RecoveredTier

__all__ = ["Compaction", "compact_lane"]

BATCH_BYTES = 32 * 1024 * 1024
"""Bytes that are copied, and then synced, in one batch."""


@dataclass(slots=True)
class Compaction:
    """What compacting a lane did, or would do.

    Attributes:
        before: the layout before.
        after: the layout after.
        moved: number of chunks moved.
        dropped: number of chunks that were damaged and therefore not moved.
        faults: everything found wrong: dropped chunks, erased damaged records, truncated
            segments, and segments that cannot be used and were not changed.
    """

    before: LaneLayout
    after: LaneLayout
    moved: int
    dropped: int
    faults: list[Fault] = field(default_factory=list)


def compact_lane(
    folder: Path,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda moved, live: None,
    trust: Trust = STRICT,
    without: Collection[Path] = (),
) -> Compaction | None:
    """Compact the lane in `folder`, and own it meanwhile. None if it holds no segment.

    Args:
        dry_run: only report what would be freed; nothing is changed.
        progress: called with the number of chunks moved so far and the number of live chunks.
        trust: whose files are accepted.
        without: segments that a dry run leaves out, as the lane's owner could not use them.

    Raises:
        LaneBusyError: if a living process owns the lane.
        KVStoreError: if the tier cannot open the lane.
        OSError: from the file system; work done until then is kept.
    """
    described = read_namespace(folder.parent)
    namespace = Namespace(folder.parent.name, described["identity"])
    geometry = held_geometry(folder, described["digest"])
    if geometry is None:
        faults, none = _unusable(folder), LaneLayout(0, 0, 0, 0, 0, 0)
        return Compaction(none, none, 0, 0, faults) if faults else None
    if dry_run:
        epochs = (read_epoch(folder.parent),)
        before = lane_layout(folder, described["digest"], epochs, without)
        return Compaction(before, _predicted(before, geometry), 0, 0)
    tier = DiskTier(
        folder.parent.parent,
        namespace,
        geometry.chunk_bytes,
        None,
        segment_bytes=geometry.file_bytes,
        lane=int(folder.name.removeprefix("lane-")),
        strict_modes=trust.strict,
        sealed=geometry.sealed,
    )
    region = PinnedRegion.private(1, geometry.slot_bytes)
    try:
        return _compact(tier, region, progress)
    finally:
        region.close()


def _compact(
    tier: DiskTier, region: PinnedRegion, progress: Callable[[int, int], None]
) -> Compaction:
    recovered = tier.open(region)
    before = _layout(tier, [slot for _, slot in recovered.entries])
    done = Compaction(before, before, 0, 0, tier.volumes[0].recovered.faults)
    try:
        engine = EngineThread([tier])
    except BaseException:
        tier.abandon()
        raise
    try:
        _lay_out(tier, recovered, engine, done, progress)
    finally:
        engine.close([()])
    return done


def _lay_out(
    tier: DiskTier,
    recovered: RecoveredTier,
    engine: EngineThread,
    done: Compaction,
    progress: Callable[[int, int], None],
) -> None:
    """Carry out the moves of the core's compactor until none is left."""
    order = [key for key, _ in recovered.entries]
    batch = max(1, BATCH_BYTES // tier.geometry.slot_bytes)
    recovered = replace(recovered, relocation_chunks=batch)
    view = OwnedTier(0, recovered, create_policy("fifo", max(1, len(order))), batch)
    view.compactor.set_rate(batch)
    view.compactor.lay_out(order)
    # No rate limit is needed offline: allow a batch for each simulated second.
    now = 0.0
    while not view.compactor.laid_out:
        now += 1.0
        move = view.compaction(now)
        if move is None:
            continue
        completion = _make(engine, move)
        view.upkeep_ended(move, completion, now, False)
        lost = _lost(tier, move, completion)
        done.faults += lost
        done.dropped += len(lost)
        done.moved = view.compactor.relocated
        progress(done.moved, len(view.entries))
        if completion.error is not None and (completion.unread or not move.keys):
            raise OSError(None, completion.error)
    tier.erase_displaced(view.entries.values())
    done.after = _layout(tier, [view.entries[key] for key in order if key in view.entries])


def _make(engine: EngineThread, move: Move) -> Completion:
    """Carry out one move; its completion reports a fault."""
    engine.submit([move])
    while not (ended := engine.take()):
        engine.wait(1.0)
    return ended[0]


def _lost(tier: DiskTier, move: Move, completion: Completion) -> list[Fault]:
    """Return the chunks of a move whose payloads do not match their records."""
    unread = set(completion.unread)
    lost = [place for place, ok in enumerate(completion.ok) if not ok and place not in unread]
    faults = []
    for place in lost:
        path, slot = tier.where(move.slots[place])
        what = "payload does not match its digest"
        faults.append(Fault(str(path), slot, what, move.keys[place].hex()))
    return faults


def _layout(tier: DiskTier, slots: list[int]) -> LaneLayout:
    return layout_of(slots, len(tier.volumes[0].segments), tier.geometry)


def _predicted(before: LaneLayout, geometry: Geometry) -> LaneLayout:
    """Return the layout that compaction would leave."""
    room = before.slots - before.live >= geometry.slots
    kept = before.needed if room else before.segments
    return LaneLayout(
        kept,
        kept * geometry.file_bytes,
        kept * geometry.slots,
        before.live,
        kept if room else before.extents,
        before.needed,
    )


def _unusable(folder: Path) -> list[Fault]:
    """Return why none of the segments can be used."""
    faults = []
    for _, path in segment_files(folder):
        try:
            read_header(path)
        except ForeignFileError as error:
            faults.append(Fault.of(path, error))
        else:
            faults.append(Fault(str(path), None, "belongs to another namespace"))
    return faults
