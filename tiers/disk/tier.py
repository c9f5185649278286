"""Disk tier: chunks in slots of segment files, on one path or several.

This module is long because `Tier` has many calls, and each is spread over several paths here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.concurrency import Daemons
from kvstore.errors import ConfigError, ForeignFileError, KVStoreError, PathUnusableError
from kvstore.tiers.base import Tier, Transfer, error_of
from kvstore.tiers.codec import Codec
from kvstore.tiers.coding import Coder
from kvstore.tiers.disk.epoch import lost_epoch, read_epoch
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.io import IOBackend
from kvstore.tiers.disk.lane import newest_told
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.disk.recovery import held_geometry
from kvstore.tiers.disk.relocation import Place, Relocated, relocate
from kvstore.tiers.disk.trust import Trust
from kvstore.tiers.disk.volume import Job, Use, Volume, warn_of_unreadable
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.pinned import PinnedRegion, round_to_page
from kvstore.tiers.sealing import Sealer
from kvstore.types import Changes, RecoveredTier, about

__all__ = ["DiskTier"]

RELOCATION_BYTES = 2 * 1024 * 1024
"""Bytes that compaction copies at once: what is urgent waits no longer than for these."""

NOTE_CHUNKS = 256
"""Chunks whose uses are written down at once: a few milliseconds of a thread."""

KEYS_SECONDS = 10.0
"""Seconds within which the source of keys has to answer where somebody waits for it."""

SEALED_SECONDS = 0.2
"""Seconds in which an extent is certainly sealed: hundreds of times what it takes."""

OPENING_SECONDS = 30.0
"""How long an opening waits for a neighbour that is amid a reset, on another path."""

logger = logging.getLogger("kvstore.disk")


class DiskTier(Tier):
    """One lane of one namespace on each of its paths.

    Segments are dealt out to the paths in turn: segment s is segment ``s // n`` of
    path ``s % n``, n being the number of paths. Each has threads of its own, so a
    slow path does not hold up another.

    Args:
        paths: folder of the cache, or several on several disks; made with mode 0700.
        namespace: whose bytes they are.
        chunk_bytes: size of every chunk.
        capacity_bytes: hard limit for all files of the lanes, shared out evenly. None keeps
            the segments that there are: none is removed at opening, and none is added.
        segment_bytes: size of a segment file, at most; None: see `Geometry.wanted`.
        io: name of the I/O backend, or "auto".
        io_threads: threads that do I/O, for each path.
        lane: number of the lane; by default the first that is free.
        strict_modes: whether folders and files that others own or may write are refused.
        share_after_reset: whether a reset joins the epoch of peers that were reset before.
        sealed: whether payloads are sealed.
        keys: with which they are; without them sealed payloads can be relocated, and no more.
        codec: encodes chunks before they are written, and decodes what is read.

    Raises:
        ConfigError: with `keys`, if the package ``cryptography`` is missing.
    """

    def __init__(
        self,
        paths: Path | Sequence[Path],
        namespace: Namespace,
        chunk_bytes: int,
        capacity_bytes: int | None,
        *,
        segment_bytes: int | None,
        io: str = "auto",
        io_threads: int = 4,
        lane: int | None = None,
        strict_modes: bool = True,
        share_after_reset: bool = False,
        sealed: bool = False,
        keys: KeyRing | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._sealed = sealed or keys is not None
        self.sealer = None if keys is None else Sealer(keys, namespace.digest)
        self._codec = codec
        self._coder = Coder.of(self.sealer, codec, chunk_bytes)
        self._share_after_reset = share_after_reset
        self._paths = [paths] if isinstance(paths, Path) else list(paths)
        self._namespace = namespace
        self._stored_bytes = chunk_bytes if codec is None else codec.coded_bytes(chunk_bytes)
        self._capacity = capacity_bytes
        self._segment_bytes = segment_bytes
        self._io = io
        self._thread_count = io_threads
        self._lane = lane
        self.trust = Trust(strict_modes)
        self._sequence = 0
        self.key_ring = keys
        self.refreshes = keys is not None
        # How often the keys had changed, and the segments that were not checked since.
        self._keys_seen = 0 if keys is None else keys.changes
        self._unchecked: deque[tuple[int, int]] = deque()
        # Slots that were written while one is being checked.
        self._rewritten: set[int] | None = None
        # Chunks whose keys are not known that were found in this look, and in the one before.
        self._unreadable = self._unreadable_before = 0
        self._moving = 0
        self._still = asyncio.Event()
        self.volumes: list[Volume] = []

    # -- opening -----------------------------------------------------------------------

    def open(self, region: PinnedRegion) -> RecoveredTier:
        slot_bytes = region.row_bytes if self._codec is None else round_to_page(self._stored_bytes)
        wanted = Geometry.wanted(
            self._segment_bytes,
            (self._capacity or 0) // len(self._paths),
            slot_bytes,
            self._stored_bytes,
            self._sealed,
        )
        if not wanted.slots:
            smallest = Geometry(1, slot_bytes, self._stored_bytes).file_bytes
            raise ConfigError(
                f"segment_bytes = {self._segment_bytes}: a segment must hold at least one chunk "
                f"of {self._stored_bytes} bytes, so at least {smallest} bytes"
            )
        while True:
            epoch = self._standing_epoch()
            try:
                self._open_volumes(wanted, epoch)
                break
            except ForeignFileError:
                # A neighbour may have been reset in between, and left its lane.
                if self._standing_epoch() == epoch:
                    raise
        self.geometry = self.volumes[0].geometry
        self._region = region
        self._sequence = max(volume.recovered.sequence for volume in self.volumes)
        segments = [
            self._segment(index, number)
            for index, volume in enumerate(self.volumes)
            for number in volume.segments
        ]
        entries = self._entries()
        for volume in self.volumes:
            volume.forget_recovered()
        return RecoveredTier(
            name=self.name,
            medium="disk",
            entries=entries,
            segment_slots=self.geometry.slots,
            segments=sorted(segments),
            max_segments=max(sum(volume.max_segments for volume in self.volumes), len(segments)),
            stripes=len(self.volumes),
            relocation_chunks=max(1, RELOCATION_BYTES // self.geometry.slot_bytes),
            note_chunks=NOTE_CHUNKS,
            payload_bytes=self._stored_bytes,
        )

    def _held(self, lane: int, wanted: Geometry) -> Geometry:
        """Return the geometry of a lane's segments on the other paths, or else `wanted`.

        A path that is new takes that of the others.
        """
        for path in self._paths[1:]:
            folder = self._namespace.establish(path, self.trust) / f"lane-{lane}"
            with contextlib.suppress(OSError):
                found = held_geometry(folder, self._namespace.digest, wanted)
                if found and found.file_bytes * len(self._paths) <= (self._capacity or math.inf):
                    return found
        return wanted

    def _open_volumes(self, wanted: Geometry, epoch: int) -> None:
        try:
            for path in self._paths:
                volume = Volume(
                    path,
                    self._namespace,
                    self.volumes[0].geometry if self.volumes else wanted,
                    None if self._capacity is None else self._capacity // len(self._paths),
                    io=self._io,
                    io_threads=self._thread_count,
                    lane=self._lane,
                    trust=self.trust,
                    epoch=epoch,
                    coder=self._coder,
                    first=self.volumes[0].lane.number if self.volumes else None,
                    elsewhere=self._held,
                )
                self.volumes.append(volume)
                failed = volume.raise_epoch(epoch, seconds=OPENING_SECONDS) if epoch else 0
                if isinstance(failed, str):
                    raise PathUnusableError(failed)
                # Where no epoch was raised, too.
                volume.lane.tell_epoch(epoch)
                if volume.geometry != self.volumes[0].geometry:
                    raise ConfigError(
                        f"the segments in {volume.lane.folder} have {volume.geometry.slots} slots, "
                        f"those in {self.volumes[0].lane.folder} {self.volumes[0].geometry.slots}; "
                        "remove one or the other"
                    )
        except BaseException:
            self.abandon()
            raise

    def _standing_epoch(self) -> int:
        """The newest epoch of the namespace, on all paths.

        Raises:
            ForeignFileError: if a lane was in a newer one.
        """
        folders = [self._namespace.establish(path, self.trust) for path in self._paths]
        try:
            # In this order, as an epoch is told after it has been written.
            newest, lane = max(newest_told(folder, self.trust) for folder in folders)
        except OSError as error:
            raise PathUnusableError(f"{error.filename}: {error.strerror}") from error
        epoch = max(read_epoch(folder, self.trust) for folder in folders)
        if newest > epoch:
            raise ForeignFileError(f"{lane}: {lost_epoch(lane.parent, newest, epoch)}")
        return epoch

    def _entries(self) -> list[tuple[bytes, int]]:
        """Return the entries of the volumes, coldest first; for a key on several, the newest."""
        if len(self.volumes) == 1:
            return self.volumes[0].recovered.entries
        found = [
            (sequence, key, self._slot(index, slot))
            for index, volume in enumerate(self.volumes)
            for (key, slot), sequence in zip(
                volume.recovered.entries, volume.recovered.sequences, strict=True
            )
        ]
        newest: dict[bytes, int] = {}
        for _, key, slot in sorted(found):
            newest.pop(key, None)
            newest[key] = slot
        return list(newest.items())

    def _segment(self, volume: int, number: int) -> int:
        """A segment of a volume, as the tier numbers it."""
        return number * len(self.volumes) + volume

    def _slot(self, volume: int, slot: int) -> int:
        """A slot of a volume, as the tier numbers it."""
        number, within = divmod(slot, self.geometry.slots)
        return self._segment(volume, number) * self.geometry.slots + within

    @property
    def name(self) -> str:
        """How the tier is called in logs and statistics."""
        return f"disk:{','.join(map(str, self._paths))}"

    @property
    def namespace_digest(self) -> str:
        """The digest of the namespace, which its segments carry."""
        return self._namespace.digest

    @property
    def epoch(self) -> int:
        """The epoch in which this process is: only chunks of this one are exchanged."""
        return self.volumes[0].epoch

    @property
    def backend(self) -> IOBackend:
        """The backend of the first path."""
        return self.volumes[0].backend

    @property
    def description(self) -> str:
        if not self.volumes:
            return f"disk {self.name}, closed"
        geometry, first = self.geometry, self.volumes[0]
        segments = sum(volume.max_segments for volume in self.volumes)
        codec = "" if self._codec is None else f"{self._codec}, "
        return (
            f"disk {', '.join(str(volume.lane.folder) for volume in self.volumes)}, {codec}"
            f"{segments} segments of {geometry.slots} chunks, "
            f"{segments * geometry.file_bytes} B, I/O {first.backend.name} x{first.threads.count}"
        )

    # -- moving ------------------------------------------------------------------------

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._move(Job(keys, slots, rows, [False] * len(keys), load=True))

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        job = Job(keys, slots, rows, [False] * len(keys), load=False, sequence=self._sequence)
        job.coder = None if self._coder is None else self._coder.begun()
        self._sequence += len(keys)
        if self._rewritten is not None:
            self._rewritten.update(slots)
        return await self._move(job)

    async def _move(self, job: Job) -> Transfer:
        if not job.keys:
            return Transfer([])
        self._moving += 1
        try:
            if len(self.volumes) == 1:
                told = await self.volumes[0].move(job, range(len(job.keys)), self._region)
            else:
                told = await self._move_striped(job)
        except TimeoutError as error:
            told = str(error)
        finally:
            self._moving -= 1
            if not self._moving:
                self._still.set()
        return Transfer(job.ok, error_of(told, job.ok), sorted(job.unread))

    async def _move_striped(self, job: Job) -> str | None:
        segments, within = np.divmod(np.array(job.slots, np.int64), self.geometry.slots)
        numbers, volumes = np.divmod(segments, len(self.volumes))
        job.slots = (numbers * self.geometry.slots + within).tolist()
        parts = [
            volume.move(job, np.nonzero(volumes == index)[0].tolist(), self._region)
            for index, volume in enumerate(self.volumes)
            if (volumes == index).any()
        ]
        # Whatever one of them raises: the rows are theirs until all have ended.
        told = await asyncio.gather(*parts, return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException):
                raise error
        return next((error for error in told if isinstance(error, str)), None)

    # -- the rest ----------------------------------------------------------------------

    async def grow(self) -> tuple[int | None, str | None]:
        told: str | None = None
        fewest_first = sorted(enumerate(self.volumes), key=lambda each: len(each[1].segments))
        for index, volume in fewest_first:
            # Stores may wait for nothing but this.
            outcome = await volume.threads.run(volume.grow, ahead=True)
            if isinstance(outcome, int):
                return self._segment(index, outcome), None
            told = outcome or told
        return None, told

    async def note_uses(self, keys: Sequence[bytes], slots: Sequence[int]) -> str | None:
        uses: list[list[Use]] = [[] for _ in self.volumes]
        for sequence, (key, slot) in enumerate(zip(keys, slots, strict=True), self._sequence):
            index, number, within = self._locate(slot)
            uses[index].append((number, within, key, sequence))
        self._sequence += len(keys)
        each = zip(self.volumes, uses, strict=True)
        return await self._on_each([partial(volume.note_uses, its) for volume, its in each])

    async def _on_each(self, calls: Sequence[Callable[[], str | None]]) -> str | None:
        """Have the threads of each volume make its call; returns what went wrong first."""
        told: str | None = None
        for volume, call in zip(self.volumes, calls, strict=True):
            try:
                outcome = await volume.threads.run(call)
            except TimeoutError as error:
                outcome = str(error)
            told = told or outcome
        return told

    async def list_segment(self, segment: int) -> list[tuple[bytes, int]]:
        number, index = divmod(segment, len(self.volumes))
        volume = self.volumes[index]
        found = await volume.threads.run(partial(volume.list_segment, number))
        first = segment * self.geometry.slots
        return [(key, first + slot) for key, slot in found]

    async def relocate(
        self, keys: Sequence[bytes], slots: Sequence[int], targets: Sequence[int]
    ) -> Transfer:
        sources = [self._place(slot) for slot in slots]
        homes = [self._place(slot) for slot in targets]
        volume = self.volumes[slots[0] // self.geometry.slots % len(self.volumes)]
        changed = {self._locate(slot)[0] for slot in targets}

        def copy() -> Relocated:
            done = relocate(keys, sources, homes, self.sealer)
            for slot, target, ok in zip(slots, targets, done.ok, strict=True):
                if ok:
                    (index, *source), (other, *home) = self._locate(slot), self._locate(target)
                    self.volumes[index].move_reads(source, self.volumes[other], home)
            for index in changed:
                self.volumes[index].lane.touch()
            return done

        try:
            done = await volume.threads.run(copy)
        except TimeoutError as error:
            return Transfer([False] * len(keys), str(error), range(len(keys)))
        unread = [place for place, ok in enumerate(done.ok) if not ok and place not in done.lost]
        return Transfer(done.ok, error_of(done.error, done.ok), unread)

    def segments_in(self, capacity_bytes: int) -> list[int]:
        share = capacity_bytes // len(self.volumes)
        return [volume.segments_in(share) for volume in self.volumes]

    def resize(self, capacity_bytes: int) -> None:
        for volume in self.volumes:
            volume.resize(capacity_bytes // len(self.volumes))

    async def remove_segment(self, segment: int) -> str | None:
        number, index = divmod(segment, len(self.volumes))
        volume = self.volumes[index]
        return await volume.threads.run(partial(volume.remove, number))

    async def outdated_segments(self) -> list[int]:
        if self.sealer is None:
            raise ConfigError(f"tier {self.name}: its chunks are not encrypted")
        keys = self.sealer.keys
        # The key that was made a moment ago counts. In a thread of its own: the source of the keys
        # may never answer.
        looking = asyncio.wrap_future(Daemons("kvstore-keys").submit(keys.look))
        await asyncio.wait([looking], timeout=KEYS_SECONDS)
        if not looking.done():
            raise KVStoreError(f"{keys.source} does not answer")
        looking.result()
        # Who has just taken the one before it has sealed by then, and is seen.
        await asyncio.sleep(SEALED_SECONDS)
        found = []
        for index, volume in enumerate(self.volumes):
            for number in list(volume.segments):
                look = partial(volume.is_outdated, number, keys)
                try:
                    outdated = await volume.threads.run(look)
                except TimeoutError as error:
                    raise KVStoreError(f"tier {self.name}: {error}") from error
                if outdated:
                    found.append(self._segment(index, number))
        return found

    async def refresh(self) -> Changes:
        """Tell of keys that are not known any more, and of chunks that are sealed with them."""
        sealer, unchecked, epoch = self.sealer, self._unchecked, self.epoch
        if sealer is not None and (forgotten := sealer.keys.forgotten()):
            return forgotten
        if sealer is not None and sealer.keys.changes != self._keys_seen:
            seen = sealer.keys.changes
            unchecked.clear()
            for index, volume in enumerate(self.volumes):
                # Others come and go in other threads.
                unchecked.extend((index, number) for number in list(volume.segments))
            self._keys_seen, self._unreadable = seen, 0
        while sealer is not None and unchecked:
            index, number = unchecked[0]
            # The next call begins with another one if this raises.
            unchecked.rotate(-1)
            volume = self.volumes[index]
            check = partial(volume.list_unreadable, number, sealer.keys)
            self._rewritten = rewritten = set[int]()
            try:
                found = await volume.threads.run(check)
            finally:
                self._rewritten = None
            unchecked.pop()
            self._unreadable += len(found)
            if not unchecked:
                # Their records stay, and would be told with every change of keys.
                more = self._unreadable > self._unreadable_before
                warn_of_unreadable(self.name, more * self._unreadable)
                self._unreadable, self._unreadable_before = 0, self._unreadable
            first = self._segment(index, number) * self.geometry.slots
            lost = [(key, first + slot) for key, slot in found if first + slot not in rewritten]
            if lost and self.epoch == epoch:
                return Changes(lost=lost)
        return Changes()

    def where(self, slot: int) -> tuple[Path, int]:
        """The file in which a slot lies, and its number there."""
        segment, within = self._place(slot)
        return segment.path, within

    def erase_displaced(self, valid: Iterable[int]) -> None:
        """Erase the records of all slots but `valid`. May block; nothing else runs.

        Raises:
            OSError: as the system says.
        """
        kept = set(valid)
        for index, volume in enumerate(self.volumes):
            for number, segment in volume.segments.items():
                first = self._segment(index, number) * self.geometry.slots
                live = segment.index.live().slots
                segment.index.erase_slots([slot for slot in live if first + slot not in kept])

    def _place(self, slot: int) -> Place:
        index, number, within = self._locate(slot)
        return self.volumes[index].segments[number], within

    def _locate(self, slot: int) -> tuple[int, int, int]:
        """Where a slot is: the volume, the segment of the volume, the slot of the segment."""
        segment, within = divmod(slot, self.geometry.slots)
        number, index = divmod(segment, len(self.volumes))
        return index, number, within

    async def erase(self, keys: Sequence[bytes]) -> str | None:
        # Displaced copies may lie anywhere, on any path.
        return await self._on_each([partial(each.erase_keys, keys) for each in self.volumes])

    async def clear(self) -> list[int] | str:
        epoch = await self._next_epoch()
        if isinstance(epoch, str):
            return epoch
        # The records stay, but are not valid in the new epoch.
        for volume in self.volumes:
            volume.enter_epoch(epoch)
        return sorted(
            self._segment(index, number)
            for index, volume in enumerate(self.volumes)
            for number in volume.segments
        )

    async def _next_epoch(self) -> int | str:
        """Move the namespace to a newer epoch, which is this process's alone; or why it cannot.

        With `share_after_reset` it is that of the peers that were reset before.
        """
        highest = await self._highest([volume.newest_epoch for volume in self.volumes])
        if isinstance(highest, str):
            return highest
        joins = self._share_after_reset and highest > self.epoch
        wanted = highest if joins else max(highest, self.epoch) + 1
        while True:
            before = await self._highest(
                # Nothing that is there is found any more in any case.
                [partial(volume.raise_epoch, wanted, giving=True) for volume in self.volumes]
            )
            if isinstance(before, str):
                return before
            if before < wanted:
                return wanted
            if self._share_after_reset and before == wanted:
                return wanted
            # Another process was faster.
            wanted = before if self._share_after_reset else before + 1

    async def _highest(self, calls: Sequence[Callable[[], int | str]]) -> int | str:
        """The highest answer of the volumes, or why one of them has none."""
        answers: list[int] = []
        for volume, call in zip(self.volumes, calls, strict=True):
            answer = await volume.threads.run(call)
            if isinstance(answer, str):
                return answer
            answers.append(answer)
        return max(answers)

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        # A record that is written now would be lost between reading and writing the index.
        while self._moving:
            self._still.clear()
            await self._still.wait()
        for volume in self.volumes:
            await volume.threads.idle()

        def order_of(volume: int) -> Iterator[tuple[int, int]]:
            for sequence, (_, slot) in enumerate(coldest_first, self._sequence):
                index, number, within = self._locate(slot)
                if index == volume:
                    yield number * self.geometry.slots + within, sequence

        try:
            # The threads put the orders together: with a million chunks that takes long.
            await asyncio.gather(
                *(_close(volume, order_of(index)) for index, volume in enumerate(self.volumes))
            )
        finally:
            # Each has ended by now, also when this was cancelled: a second call does nothing.
            self.volumes = []

    def detach(self) -> None:
        for volume in self.volumes:
            volume.threads.detach()

    def abandon(self) -> None:
        for volume in self.volumes:
            # Files of a call that does not return stay open until it does.
            volume.threads.close(1.0, volume.close_files)
        self.volumes = []


async def _close(volume: Volume, order: Iterable[tuple[int, int]]) -> None:
    def finish() -> None:
        try:
            volume.save_recency(order)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "there is no memory for it"
            logger.warning(
                "disk tier: recency is not saved: %s",
                why,
                extra=about("disk.recency_lost", error=why),
            )

    try:
        await volume.threads.run(finish)
    except TimeoutError as error:
        logger.warning(
            "disk tier: recency is not saved: %s",
            error,
            extra=about("disk.recency_lost", error=error),
        )
    finally:
        try:
            await volume.threads.end(volume.close_files)
        except TimeoutError:
            logger.warning(
                "disk tier: an I/O call does not return; files stay open until it does",
                extra=about("disk.call_hangs"),
            )
