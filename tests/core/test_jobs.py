"""Jobs of a server with host memory of its own: each ends, and none gets bytes that are not its."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.core import OwnedTier, PeerTier
from kvstore.core.residency.base import TierView
from kvstore.core.tier_only import STORE_SHARE, Job, Jobs
from kvstore.policies import create_policy
from kvstore.policies.registry import policy_names
from kvstore.types import NO_MOVE, Changes, Completion, LogLine, Move, Op, RecoveredTier
from tests.core.rig import chain

SLOTS = 8


def recovered(
    held: Sequence[bytes] = (), segments: int = 1, most: int = 1, notes: int = 0
) -> RecoveredTier:
    entries = [(key, slot) for slot, key in enumerate(held)]
    segment_list = list(range(segments))
    return RecoveredTier("disk", "disk", entries, SLOTS, segment_list, most, note_chunks=notes)


class Bench:
    """Jobs over one owned tier and perhaps a peer; the test says how moves end."""

    def __init__(
        self,
        held: Sequence[bytes] = (),
        *,
        most: int = 1,
        rows: int = 64,
        policy: str = "lru",
        notes: int = 0,
    ) -> None:
        self.log: list[str] = []
        opening = recovered(held, 1, most, notes)
        self.tier = OwnedTier(0, opening, create_policy(policy, most * SLOTS), 32)
        self.peer = PeerTier(1, RecoveredTier("peer", "disk", [], SLOTS, [], 0), 32)
        tiers: list[TierView] = [self.tier, self.peer]
        self.jobs = Jobs(tiers, rows, deadline=1.0, max_wait=10.0, events=True, log=self._log)
        self.now = 100.0
        self.moves: list[Move] = []
        self.ended: list[Job] = []
        self._done: list[Completion] = []
        self.jobs.poll(self.now)

    def _log(self, line: LogLine) -> None:
        self.log.append(line.text)

    def step(self, seconds: float = 0.0) -> list[Move]:
        """End a step and begin the next; returns the moves that it has handed out."""
        moves = self.jobs.flush(self.now)
        self.moves += moves
        self.now += seconds
        done, self._done = self._done, []
        self.jobs.poll(self.now, done)
        self.ended += self.jobs.take_ended()
        return moves

    def end(self, move: Move, ok: Sequence[bool] | None = None, error: str | None = None) -> None:
        """The move has ended; the next step hears of it."""
        self.moves.remove(move)
        answers = [True] * len(move.keys) if ok is None else list(ok)
        grown = self.tier.slots.segments if move.op is Op.GROW else 0
        segments = [grown] if move.op is Op.GROW else []
        self._done.append(Completion(move.id, answers, segments, error))

    def finish(self) -> None:
        """Everything that is under way ends well, and what comes of it."""
        for _ in range(50):
            for move in list(self.moves):
                self.end(move)
            self.step()
        assert not self.moves

    def only_end(self) -> Job:
        (end,) = self.ended
        self.ended = []
        return end


A = chain("a", 6)
B = chain("b", 6)


def test_a_store_ends_when_its_chunks_are_there_and_they_are_found() -> None:
    bench = Bench()
    bench.jobs.store(7, A, range(6), "r", bench.now)
    assert not any(map(bench.jobs.lookup, A))
    bench.finish()
    end = bench.only_end()
    assert (end.number, end.whole, end.moved, end.loaded) == (7, True, 6, [])
    assert all(map(bench.jobs.lookup, A))
    bench.jobs.store(8, A, range(6), "r", bench.now)
    bench.finish()
    assert (end := bench.only_end()).whole
    assert end.moved == 0


def test_it_is_told_how_long_chunks_that_leave_were_not_used() -> None:
    bench = Bench(most=8)
    for number in range(32):
        bench.jobs.store(number, chain(str(number), 6), range(6), "r", bench.now)
        bench.finish()
        bench.step(1.0)
    stats = bench.tier.stats()
    assert stats.evicted >= 64
    assert stats.ages.count > 0
    assert 5.0 <= stats.ages.mean <= 32.0


def test_a_load_tells_which_of_its_chunks_have_come() -> None:
    bench = Bench(A)
    bench.jobs.load(1, [*A, b"nowhere"], range(7), bench.now)
    # On their way to these rows, and to no others.
    assert not any(map(bench.jobs.lookup, A))
    (move,) = bench.step()
    assert (move.op, move.keys, move.rows) == (Op.PROMOTE, A, list(range(6)))
    bench.end(move, [True, True, False, True, True, True], "flipped")
    bench.step()
    end = bench.only_end()
    assert not end.whole
    assert end.loaded == [key for key in A if key != A[2]]
    assert [bench.jobs.lookup(key) for key in A] == [key != A[2] for key in A]


def test_what_a_lookup_has_found_stays_until_the_step_ends() -> None:
    bench = Bench(chain("old", SLOTS))
    old = chain("old", SLOTS)
    bench.jobs.store(1, A, range(6), "r", bench.now)
    assert all(map(bench.jobs.lookup, old))
    bench.jobs.load(2, old[:4], range(10, 14), bench.now)
    read, write = bench.step()
    assert read.op is Op.PROMOTE
    # Nothing is written where others read.
    assert not set(read.slots) & set(write.slots)


def test_a_job_that_finds_nothing_ends_at_once() -> None:
    bench = Bench()
    bench.jobs.load(1, A, range(6), bench.now)
    bench.jobs.store(2, [], [], "r", bench.now)
    bench.step()
    assert [(end.number, end.whole) for end in bench.ended] == [(1, False), (2, True)]


def test_a_tier_that_cannot_store_refuses_and_tries_again_with_one_chunk() -> None:
    bench = Bench()
    bench.jobs.store(1, A, range(6), "r", bench.now)
    (move,) = [move for move in bench.step() if move.op is Op.CASCADE]
    bench.end(move, [False] * 6, "no space")
    bench.step()
    assert not bench.only_end().whole
    bench.jobs.store(2, B, range(6), "r", bench.now)
    bench.step()
    assert not bench.only_end().whole
    assert bench.tier.stats().refused == 6
    assert any("no space" in line for line in bench.log)
    bench.now += 60
    bench.step()
    bench.jobs.store(3, B, range(6), "r", bench.now)
    (move,) = [move for move in bench.step() if move.op is Op.CASCADE]
    assert len(move.keys) == 1
    bench.finish()
    assert bench.only_end().whole


def test_stores_do_not_take_the_servers_memory() -> None:
    bench = Bench(most=8, rows=8)
    bench.jobs.store(1, A, range(6), "r", bench.now)
    bench.step()
    assert bench.jobs.unsaved >= STORE_SHARE * 8
    bench.jobs.store(2, B, range(6), "r", bench.now)
    bench.step()
    assert (end := bench.only_end()).number == 2
    assert not end.whole


def test_a_silent_tier_misses_and_gives_up_what_waits_but_not_what_has_begun() -> None:
    bench = Bench(A, most=1)
    bench.jobs.load(1, A[:1], [0], bench.now)
    bench.jobs.store(2, B[:2], [1, 2], "r", bench.now)
    bench.step()
    for _ in range(60):
        bench.step(0.1)
    assert not any(map(bench.jobs.lookup, A))
    assert bench.ended == []
    bench.jobs.store(3, B[2:], range(3, 7), "r", bench.now)
    bench.step()
    assert bench.only_end().number == 3
    for move in list(bench.moves):
        bench.end(move)
    bench.step()
    assert sorted(end.number for end in bench.ended) == [1, 2]
    assert all(map(bench.jobs.lookup, A))
    assert any("has not answered" in line for line in bench.log)


def test_a_neighbours_chunks_are_read_and_not_written_again() -> None:
    bench = Bench()
    changes = Changes([(key, 40 + place) for place, key in enumerate(A)])
    bench.jobs.poll(bench.now, [Completion(NO_MOVE, [], changes=changes, tier=1)])
    assert changes.taken, "its tier may tell more"
    bench.jobs.store(1, A, range(6), "r", bench.now)
    bench.jobs.load(2, A, range(6), bench.now)
    (move,) = bench.step()
    assert (move.op, move.tier, move.slots) == (Op.PROMOTE, 1, list(range(40, 46)))
    bench.finish()
    assert [(end.number, end.whole, end.moved) for end in bench.ended] == [
        (1, True, 0),
        (2, True, 6),
    ]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("seed", range(8))
def test_random_jobs_all_end_and_get_their_own_bytes(policy: str, seed: int) -> None:
    chance = random.Random(f"{policy} {seed}")
    prompts = [chain(f"p{n}", chance.randint(1, 12)) for n in range(6)]
    bench = Bench(most=2, rows=40, policy=policy)
    disk: dict[int, bytes] = {}
    """What each slot holds."""
    begun: set[int] = set()

    def end(move: Move) -> None:
        fails = chance.random() < 0.1
        ok = [not (fails and chance.random() < 0.5) for _ in move.keys]
        if move.op is Op.CASCADE:
            for key, slot, whole in zip(move.keys, move.slots, ok, strict=True):
                disk.pop(slot, None)
                if whole:
                    disk[slot] = key
        elif move.op is Op.PROMOTE:
            # What is being read is not overwritten meanwhile.
            assert [disk[slot] for slot in move.slots] == move.keys
        bench.end(move, ok, "injected" if fails else None)

    for number in range(200):
        prompt = chance.choice(prompts)
        act = chance.random()
        if act < 0.35:
            bench.jobs.store(number, prompt, range(len(prompt)), f"r{number}", bench.now)
            begun.add(number)
        elif act < 0.6:
            found = [key for key in prompt if bench.jobs.lookup(key)]
            bench.jobs.load(number, found, range(len(found)), bench.now)
            begun.add(number)
        elif bench.moves:
            end(chance.choice(bench.moves))
        if chance.random() < 0.6:
            bench.step(chance.choice([0.0, 0.01, 0.3]))
        held = [slot for move in bench.moves if move.op is Op.CASCADE for slot in move.slots] + [
            slot for move in bench.moves if move.op is Op.PROMOTE for slot in set(move.slots)
        ]
        assert len(held) == len(set(held)), "two moves name one slot"
    for _ in range(40):
        for move in list(bench.moves):
            end(move)
        bench.step(6.0)
    assert sorted(each.number for each in bench.ended) == sorted(begun)
    assert len(bench.jobs) == bench.jobs.unsaved == bench.jobs.in_flight == 0
    for key, slot in bench.tier.entries.items():
        assert disk[slot] == key
    assert len(bench.tier.entries) <= 2 * SLOTS


def test_uses_are_recorded_again_and_again_beside_a_compaction() -> None:
    held = chain("a", SLOTS)
    bench = Bench(held, notes=4)
    noted = 0
    for _ in range(100):
        bench.jobs.touch(held)
        for move in bench.step(2.0):
            noted += move.op is Op.NOTE
            bench.end(move)
    assert noted > 2
    assert bench.tier.compactor.removed_segments == 0
