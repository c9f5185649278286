"""Uses are written down now and then, a bounded number of them, and only where there are any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core import recency
from kvstore.core.recency import NOTE_SECONDS
from kvstore.types import Move, Op
from tests.core.rig import Rig, chain


def noted(rig: Rig, seconds: float = 0.0) -> list[Move]:
    """The move that writes uses down, if one is due after `seconds`; it ends at once."""
    moves = [move for move in [*rig.step(seconds), *rig.step()] if move.op is Op.NOTE]
    for move in moves:
        rig.end(move)
    return moves


def use(rig: Rig, keys: Sequence[bytes], request: str = "r") -> None:
    assert rig.resolve(keys, request) == len(keys)
    rig.use(keys, request)
    rig.core.on_request_finished(request)


def test_what_was_used_is_written_down_every_minute_and_nothing_when_nothing_was() -> None:
    keys = chain("a", 6)
    rig = Rig(rows=16, on=[keys], note_chunks=64)
    for _ in range(5):
        assert noted(rig, NOTE_SECONDS) == []
    use(rig, keys[:3], "first")
    use(rig, keys[:3], "again")
    moves = [move for _ in range(3) for move in noted(rig, NOTE_SECONDS)]
    assert [(move.tier, move.keys, move.slots) for move in moves] == [(0, keys[2::-1], [2, 1, 0])]
    assert noted(rig, NOTE_SECONDS) == []


def test_a_tier_that_writes_down_no_uses_is_not_told() -> None:
    keys = chain("a", 6)
    rig = Rig(rows=16, on=[keys])
    use(rig, keys)
    assert noted(rig, NOTE_SECONDS) + noted(rig, NOTE_SECONDS) == []


def test_many_uses_are_written_down_by_one_small_move_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recency, "MOST_USED", 20)
    keys = chain("a", 40)
    rig = Rig(rows=64, on=[keys], note_chunks=8)
    use(rig, keys)
    sizes = [len(move.keys) for move in noted(rig, NOTE_SECONDS)]
    sizes += [len(move.keys) for _ in range(8) for move in noted(rig, 1.0)]
    assert max(sizes) <= 8
    assert 20 <= sum(sizes) <= 40


def test_uses_are_written_down_where_compaction_is_on_but_not_during_its_moves() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=16, on=[keys], segment_slots=8, segments=4, relocation_chunks=4, note_chunks=64)
    rig.owned().compactor.set_rate(1000.0)
    use(rig, keys)
    moves: list[Move] = []
    for _ in range(100):
        begun = [move for move in rig.step(NOTE_SECONDS / 10) if move not in moves]
        moves += begun
        assert len(rig.moves) <= 1, "a use is written down while records are being moved"
        for move in begun:
            for _ in range(3):
                rig.step(NOTE_SECONDS)
            assert rig.moves == [move], "something is begun beside it"
            rig.end(move)
    assert [move.op for move in moves if move.op is Op.NOTE] == [Op.NOTE]
    assert Op.LIST in [move.op for move in moves]


def test_a_chunk_that_has_left_is_not_named() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=16, on=[keys], note_chunks=8)
    use(rig, keys)
    noted(rig, 0.1)
    rig.core.tiers[0].forget(keys[1:3])
    moves = noted(rig, NOTE_SECONDS) + noted(rig, NOTE_SECONDS)
    assert [move.keys for move in moves] == [[keys[3], keys[0]]]


def test_a_reset_forgets_uses() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=16, on=[keys], note_chunks=8)
    use(rig, keys)
    noted(rig, 0.1)
    rig.core.reset()
    rig.settle()
    assert noted(rig, NOTE_SECONDS) + noted(rig, NOTE_SECONDS) == []
