"""Transfers: moves under way between host memory and the tiers.

Moves get their numbers here, and their completions are taken in here. A move that was under way
at a reset goes on, but only its rows still count.

`Overtaken` does the same for copies between device and host memory. A reset forgets chunks, but
cannot stop such a copy: a store may still write its rows, a load may still read its own. The row
is not used again until each of its transfers was reported, or all are known to have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.cascade import Cascades
from kvstore.core.chunk import Chunk
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.removal import Removals
from kvstore.core.reports import Spans
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.core.residency.remote import AskedTier
from kvstore.core.wait_queue import WaitQueue
from kvstore.types import NO_MOVE, Completion, LogLine, Move, Op

__all__ = ["Overtaken", "Transfer", "Transfers"]


class Transfers:
    """The moves under way, and those that are due next on each tier.

    Attributes:
        moves: moves that were handed out and have not ended, by number.
        orphans: those of `moves` that were begun before a reset.
        cascades: copies to tiers.

    Args:
        log: where one line per change of a tier's health goes.
        removals: told of erasures that have ended. pins: told of chunks that have arrived.
        spans: told of each move.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        cascades: Cascades,
        log: Callable[[LogLine], object],
        removals: Removals,
        pins: Pins,
        spans: Spans,
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._spans = spans
        self._removals = removals
        self._tiers = tiers
        self._has_peers = any(tier.target is None for tier in tiers)
        self._queue = queue
        self.cascades = cascades
        self._log = log
        self.moves: dict[int, Move] = {}
        self.orphans: set[int] = set()
        self._next = 0

    @property
    def clearing(self) -> bool:
        """Whether a tier is still to be cleared after a reset, and clearing has not failed."""
        # Tiers of other processes are cleared after those of this process.
        asked: Sequence[TierView] = self._clearing_targets() or self._tiers
        return any(tier.clearing and not tier.gave_up_clearing for tier in asked)

    @property
    def uncleared(self) -> list[str]:
        """Names of tiers of this process that are still to be cleared after a reset."""
        return [target.name for target in self._clearing_targets()]

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> None:
        """Update the health of each tier, once a step; `compute`: seconds to compute a chunk."""
        for tier in self._tiers:
            target, stalled = tier.target, tier.health.stalled
            messages, gives_up = tier.watch(now, elapsed, deadline, max_wait, compute)
            for message in messages:
                self._log(message)
            if gives_up and tier.index.reading:
                self._queue.give_up(tier.number, now)
            if target is None or not target.queued:
                continue
            if target.full_for_now or (tier.health.stalled and not stalled):
                self.cascades.drop(target)

    # -- beginning -----------------------------------------------------------------------

    def promote(
        self, tier: TierView, chunks: Sequence[Chunk], slots: Sequence[int], now: float
    ) -> list[Move]:
        """Return moves that fill `chunks` from `slots`."""
        moves: list[Move] = []
        # One move, except for long prefixes: its end is the only sign that the tier answers.
        size = tier.max_rows_in_flight
        for start in range(0, len(chunks), size):
            part = chunks[start : start + size]
            keys = [chunk.key for chunk in part]
            rows = [chunk.row for chunk in part]
            move = Move(
                NO_MOVE, Op.PROMOTE, tier.number, keys, rows, list(slots[start : start + size])
            )
            waiters = part[0].waiters
            moves.append(self._hand_out(move, tier, now, waiters[0].id if waiters else None))
        return moves

    def due(self, now: float) -> list[Move]:
        """Return all other moves that are due: clearing, growth, copies and compaction."""
        moves: list[Move] = []
        after_owned = self._has_peers and bool(self._clearing_targets())
        for tier in self._tiers:
            target = tier.target
            compaction = None if tier.owned is None else tier.owned.compaction(now)
            own = tier.due(now, after_owned=after_owned)
            if own is not None:
                moves.append(self._hand_out(own, tier, now))
            if target is not None and target.queued:
                moves += [self._hand_out(move, tier, now) for move in self.cascades.due(target)]
            if compaction is not None:
                moves.append(self._hand_out(compaction, tier, now))
        return moves

    def ask(self, store: AskedTier, keys: Sequence[bytes], request: str, now: float) -> Move:
        """Return the move that asks a store for these keys, for a request."""
        return self._hand_out(store.ask(keys, now), store, now, request)

    def erase(self, now: float) -> list[Move]:
        """Return the erasures that are due."""
        return [self._hand_out(m, self._tiers[m.tier], now) for m in self._removals.due()]

    def _hand_out(self, move: Move, tier: TierView, now: float, request: str | None = None) -> Move:
        move.number(self._next)
        self._next += 1
        self.moves[move.id] = move
        tier.in_flight.begin(move, now)
        self._spans.move_began(move, request, now)
        return move

    def _clearing_targets(self) -> list[CopyTarget]:
        return [target for target in self.cascades.targets if target.clearing]

    # -- ending --------------------------------------------------------------------------

    def hear(self, completion: Completion) -> None:
        """Note that a move has ended; its completion may be taken in later."""
        move = self.moves.get(completion.move_id)
        if move is not None:
            self._tiers[move.tier].health.heard()

    def complete(self, completion: Completion, now: float) -> bool:
        """Take in the end of a move; False if the move is not known."""
        if completion.changes is not None:
            self._tiers[completion.tier].learn(completion.changes)
            return True
        move = self.moves.pop(completion.move_id, None)
        if move is None:
            return False
        tier = self._tiers[move.tier]
        started = tier.in_flight.end(move, now)
        self._spans.move_ended(move, completion, now)
        message = tier.health.answered()
        if message is not None:
            self._log(message)
        if completion.error is not None:
            tier.count("errors")
        tier.index.count_evicted(completion.removed)
        overtaken = move.id in self.orphans
        if tier.store is not None and not overtaken and move.op in (Op.ASK, Op.PROMOTE):
            message = tier.store.ended(move, completion, now)
            if message is not None:
                self._log(message)
        if overtaken:
            self.orphans.discard(move.id)
            self._pool.release_held(move.rows)
        owned = tier.owned
        upkeep = owned is not None and owned.upkeep_ended(move, completion, now, overtaken)
        if upkeep or overtaken or move.op is Op.ASK:
            pass
        elif move.op is Op.ERASE:
            self._removals.erased(move, completion)
        elif move.op is Op.PROMOTE:
            self._promoted(tier, move, completion, now)
            tier.health.arrived(completion.ok.count(True), started, completion.ended_by(now))
        elif move.op is Op.CASCADE:
            if tier.target is not None:
                self.cascades.ended(tier.target, move, completion, now)
        else:
            tier.clear_ended(completion.segments, completion.error, now)
        return True

    def _promoted(self, tier: TierView, move: Move, completion: Completion, now: float) -> None:
        pool, queue = self._pool, self._queue
        tier.index.end_reads(move.keys)
        chunks = [pool.chunks[key] for key in move.keys]
        newest = chunks[-1].order if chunks else -1
        if all(completion.ok):
            queue.promoted(chunks, now)
            tier.promoted(move.keys)
        else:
            unread = set(completion.unread)
            for place, (chunk, ok) in enumerate(zip(chunks, completion.ok, strict=True)):
                key = chunk.key
                if ok:
                    queue.stored((chunk,), now)
                    tier.promoted((key,))
                else:
                    queue.failed(chunk, now)
                    pool.discard(chunk)
                    tier.not_promoted(key, perhaps_whole=place in unread)
        self._pins.arrived(move.keys)
        queue.passed(newest)

    def reset(self, rows_in_transfer: Iterable[int] = (), *, close_tiers: bool = False) -> None:
        """Forget everything on every tier; of moves under way only the rows still count.

        Args:
            rows_in_transfer: rows that the device may still write or read.
            close_tiers: see `Core.reset`.
        """
        # Rows of moves that an earlier reset orphaned are held already.
        moving = (
            row for id, move in self.moves.items() if id not in self.orphans for row in move.rows
        )
        self._pool.reset(itertools.chain(moving, rows_in_transfer))
        self.orphans = set(self.moves)
        for tier in self._tiers:
            if close_tiers:
                tier.close()
            elif not tier.health.closed:
                # A closed tier keeps its chunks for the next process.
                tier.reset()


class Transfer(NamedTuple):
    """A copy of one chunk between device and host memory.

    Attributes:
        era: the era in which it was prepared.
        request: the request that it is for.
        stores: whether the device writes the row, or reads it.
    """

    era: int
    request: str
    key: bytes
    stores: bool


class Overtaken:
    """Rows that are held for transfers that were under way at a reset."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._rows: dict[Transfer, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, transfers: Iterable[tuple[Transfer, int]]) -> None:
        """Add transfers that go on, each with its row, which the pool holds once for each."""
        for transfer, row in transfers:
            self._rows.setdefault(transfer, []).append(row)

    def eras(self, request: str, *, stores: bool) -> dict[bytes, int]:
        """Return keys that a request still stores, or loads, with the era of the first transfer."""
        found: dict[bytes, int] = {}
        for transfer in self._rows:
            if (transfer.request, transfer.stores) == (request, stores):
                found[transfer.key] = min(transfer.era, found.get(transfer.key, transfer.era))
        return found

    def ended(self, transfer: Transfer) -> bool:
        """Take in the end of a transfer; False if it is not known."""
        rows = self._rows.get(transfer)
        if rows is None:
            return False
        self._pool.release_held((rows.pop(),))
        if not rows:
            del self._rows[transfer]
        return True

    def all_ended(self, era: int) -> None:
        """Free the rows of all transfers that were prepared before that era."""
        for transfer in [one for one in self._rows if one.era < era]:
            self._pool.release_held(self._rows.pop(transfer))
