"""A core on a bench: one call for each thing that a server or an engine does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvstore.core import AskedTier, Core, CoreStats, HostPool, OwnedTier, StoreGrant
from kvstore.core.chunk import READY
from kvstore.core.residency.base import TierView
from kvstore.core.residency.remote_answers import Answers
from kvstore.policies import EvictionPolicy, Protected, create_policy
from kvstore.policies.lru import LRU
from kvstore.types import Completion, Flow, Move, Op, RecoveredTier


def chain(name: str, length: int, start: int = 0) -> list[bytes]:
    """Keys of one prompt, in prefix order."""
    return [f"{name}-{depth:05d}".encode() + b"\0\0\0\0" for depth in range(start, length)]


class CountingLRU(LRU):
    """Counts how many keys it asked about."""

    asked = 0

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        def counting(key: bytes) -> int:
            self.asked += 1
            return protected(key)

        return super().evict(count, counting, incoming)


class Rig:
    """A core, a clock that only the test moves, and an engine that does what the test says.

    Args:
        rows: rows of host memory.
        on: for each tier the keys that it holds at opening, coldest first; slot i
            holds the i-th.
        segment_slots, segments, max_segments: geometry of every tier.
        in_flight: most rows on their way to one tier.
        policy, tier_policy: order host memory and the tiers; LRU unless told.
        store: what is known of a store behind the tiers; None where there is no store.
        timing: deadline, max_wait and lease of the core.
    """

    def __init__(
        self,
        rows: int = 8,
        on: Sequence[Sequence[bytes]] = ((),),
        *,
        segment_slots: int = 64,
        segments: int = 1,
        max_segments: int | None = None,
        in_flight: int = 64,
        policy: EvictionPolicy | None = None,
        tier_policy: EvictionPolicy | None = None,
        stripes: int = 1,
        relocation_chunks: int = 0,
        note_chunks: int = 0,
        store: Answers | None = None,
        flow: Flow = Flow.WRITE_THROUGH,
        **timing: Any,
    ) -> None:
        most = segments if max_segments is None else max_segments
        slots = segment_slots * most
        directories: list[TierView] = [
            OwnedTier(
                index,
                RecoveredTier(
                    f"tier{index}",
                    "disk" if index == 0 else "remote",
                    [(key, slot) for slot, key in enumerate(held)],
                    segment_slots,
                    list(range(segments)),
                    most,
                    stripes=stripes,
                    relocation_chunks=relocation_chunks,
                    note_chunks=note_chunks,
                ),
                create_policy("lru", slots) if tier_policy is None else tier_policy,
                in_flight,
                flow=flow,
            )
            for index, held in enumerate(on)
        ]
        if store is not None:
            opened = RecoveredTier("store", "remote", [], 1, [], 0)
            directories.append(AskedTier(len(directories), opened, in_flight, answers=store))
        timing = {"deadline": 1.0, "max_wait": 10.0, "lease": 3.0, **timing}
        pool = HostPool(rows, create_policy("lru", rows) if policy is None else policy)
        self.log: list[str] = []
        self.core = Core(pool, directories, log=lambda line: self.log.append(line.text), **timing)
        self.now = 100.0
        self.moves: list[Move] = []
        """Handed out and not ended."""
        self.ended: list[Completion] = []
        """Ended and not taken in."""
        self.core.poll(self.now)

    def flush(self) -> list[Move]:
        """The moves of this moment, which stay under way until `end`."""
        moves = self.core.flush(self.now)
        self.moves += moves
        return moves

    def step(self, seconds: float = 0.0) -> list[Move]:
        """End the step and begin the next, `seconds` later; returns the moves handed out."""
        moves = self.flush()
        self.now += seconds
        ended, self.ended = self.ended, []
        self.core.poll(self.now, ended)
        return moves

    def wait(self, seconds: float, each: float = 0.1) -> list[Move]:
        """Steps of `each` seconds in which the engine ends nothing."""
        moves: list[Move] = []
        for _ in range(round(seconds / each)):
            moves += self.step(each)
        return moves

    def end(
        self,
        move: Move,
        failed: Collection[bytes] = (),
        segments: Collection[int] | None = None,
        unread: Collection[bytes] = (),
        ended: float | None = None,
        unlisted: Collection[bytes] = (),
    ) -> None:
        """The engine ends `move`, at `ended`; the core hears of it at the next step.

        Of those that `failed`, nothing is known of the bytes of `unread`. Records of `unlisted` are
        damaged.
        """
        self.moves.remove(move)
        ok = [key not in failed for key in move.keys]
        tier = self.core.tiers[move.tier]
        made: list[int] = []
        slots = tier.slots.segments if isinstance(tier, OwnedTier) else 0
        if segments is not None:
            made = list(segments)
        elif move.op is Op.GROW:
            its = self.owned(move.tier).slots
            made = [next(n for n in range(slots + 1) if not its.has(n))]
        elif move.op is Op.CLEAR:
            made = list(range(slots))
        error = "injected" if failed or (segments is not None and not made) else None
        places = [move.keys.index(key) for key in unread]
        found = []
        if move.op is Op.LIST:
            size = self.owned(move.tier).slots.segment_slots
            found = [
                (key, slot)
                for key, slot in tier.entries.items()
                if slot // size == move.segment and key not in unlisted
            ]
        told = Completion(move.id, ok, made, error, found=found, unread=places, ended=ended)
        self.ended.append(told)

    def finish(self, move: Move, failed: Collection[bytes] = (), **how: Any) -> None:
        """The engine ends `move` as `end` says, and the core hears of it."""
        self.end(move, failed, **how)
        self.step()

    def arrive(self, **how: Any) -> None:
        """The only promotion under way ends, and the core hears of it."""
        self.finish(self.promotion, **how)

    def end_all(self) -> None:
        """The engine ends all that is under way; the core hears of it at the next step."""
        for move in list(self.moves):
            self.end(move)

    def run(self, seconds: float, each: float = 0.1) -> None:
        """Steps of `each` seconds in which the engine ends everything."""
        for _ in range(round(seconds / each)):
            self.step(each)
            self.end_all()

    def settle(self, seconds: float = 0.0) -> None:
        """Steps in which the engine ends everything, until nothing moves."""
        for _ in range(1000):
            self.end_all()
            took_in = bool(self.ended)
            if not self.step(seconds) and not took_in:
                return
        raise AssertionError("the core never comes to rest")

    def owned(self, tier: int = 0) -> OwnedTier:
        """A tier whose slots the core gives out."""
        found = self.core.tiers[tier]
        assert isinstance(found, OwnedTier)
        return found

    def under_way(self, op: Op, tier: int = 0) -> list[Move]:
        return [move for move in self.moves if move.op is op and move.tier == tier]

    @property
    def promotion(self) -> Move:
        """The only promotion under way."""
        (move,) = self.under_way(Op.PROMOTE)
        return move

    # -- the server ------------------------------------------------------------------

    def ask(self, keys: Sequence[bytes], request: str = "r") -> int | None:
        return self.core.lookup_prefix(keys, request)

    def resolve(self, keys: Sequence[bytes], request: str = "r", seconds: float = 0.01) -> int:
        """Ask step after step, with an engine that ends everything at once."""
        for _ in range(1000):
            answer = self.ask(keys, request)
            if answer is not None:
                return answer
            self.step(seconds)
            self.end_all()
        raise AssertionError(f"{request} is deferred for ever")

    def begin(self, keys: Sequence[bytes], request: str = "r") -> list[Move]:
        """Ask for what is not there yet, and end the step; returns the moves handed out."""
        assert self.ask(keys, request) is None
        return self.step()

    def load(self, keys: Sequence[bytes], request: str = "r") -> list[int]:
        return self.core.prepare_load(keys, request)

    def use(self, keys: Sequence[bytes], request: str = "r") -> None:
        """A load, from its begin to its end."""
        self.load(keys, request)
        self.core.complete_load(keys, request)

    def granted(self, keys: Sequence[bytes], request: str, *, patient: bool = False) -> StoreGrant:
        """What a store gets, which is not put off."""
        grant = self.core.prepare_store(keys, request, patient=patient)
        assert grant is not None
        return grant

    def put(self, keys: Sequence[bytes], request: str = "writer") -> None:
        """Store `keys` in host memory; there must be room for all."""
        grant = self.granted(keys, request)
        assert grant.keys == [key for key in dict.fromkeys(keys) if key in grant.keys]
        self.core.complete_store(grant.keys, request)
        assert all(self.in_host(key) for key in keys)

    def store(self, keys: Sequence[bytes], request: str = "writer") -> None:
        """The same, and all that follows from it ends."""
        self.put(keys, request)
        self.settle()

    def in_host(self, key: bytes) -> bool:
        chunk = self.core._pool.chunks.get(key)
        return chunk is not None and chunk.state >= READY

    @property
    def stats(self) -> CoreStats:
        return self.core.stats()


def host_of(rig: Rig, keys: Sequence[bytes]) -> int:
    """How many of `keys` are in host memory."""
    return sum(map(rig.in_host, keys))
