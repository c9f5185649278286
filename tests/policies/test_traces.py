"""The reader of traces, the replay, and the traces made from a trace."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from benchmarks.interleave import merged, sessions, shuffled, thinned
from benchmarks.traces import Request, key_of, keyed, read_trace, replay
from kvstore.policies.lru import LRU


def plain(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": at, "input_length": 9, "output_length": 1, "hash_ids": ids})
        for at, ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_mooncake_form_is_read_plain_and_compressed(tmp_path: Path) -> None:
    path = plain(tmp_path / "t.jsonl", [[0, 1], [0, 2]])
    squeezed = tmp_path / "t.jsonl.xz"
    squeezed.write_bytes(lzma.compress(path.read_bytes()))
    expected = [Request(0, 9, 1, [0, 1]), Request(1, 9, 1, [0, 2])]
    assert list(read_trace(path)) == list(read_trace(squeezed)) == expected


def test_the_packed_form_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "t.packed"
    rows = [
        {"block_tokens": 64, "requests": 3},
        [5, 9, 1, -1, 0, 2],
        [6, 9, 1, 0, 2, 1],
        [7, 9, 1, 1, 1, 1],
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [(r.timestamp, r.hash_ids) for r in read_trace(path)] == [
        (5, [0, 1]),
        (6, [0, 1, 2]),
        (7, [0, 3]),
    ]


@pytest.mark.parametrize("line", ["{", '{"timestamp": 1}', "[1, 2, 3]", "7"])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = plain(tmp_path / "t.jsonl", [[0]])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a request"):
        list(read_trace(path))


def test_hits_are_the_longest_resident_prefix() -> None:
    requests = keyed(Request(0, 0, 0, ids) for ids in ([0, 1, 2], [0, 1, 2, 3], [9, 1, 2]))
    told = replay(LRU(100), requests)
    assert (told.blocks, told.hits, told.inserts) == (10, 3, 5)
    assert told.ratio == 30.0


def test_keys_are_one_object_per_block_and_differ() -> None:
    one, other = keyed([Request(0, 0, 0, [4, 5]), Request(0, 0, 0, [5])])
    assert one[1] is other[0]
    assert len({key_of(block) for block in range(10_000)}) == 10_000


def conversation() -> list[Request]:
    """Three sessions of two requests under one common first block, and a stranger."""
    found = []
    for session in range(3):
        ids = [0, 10 + session]
        found.append(Request(100 * session, 0, 0, ids))
        found.append(Request(100 * session + 30, 0, 0, [*ids, 20 + session]))
    return sorted([*found, Request(40, 0, 0, [99])], key=lambda request: request.timestamp)


def test_requests_that_continue_one_another_are_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.interleave.COMMON", 2)
    groups = sessions(conversation())
    # The first to share the common block is taken for a continuation, later ones are not.
    assert [[request.timestamp for request in group] for group in groups] == [
        [0, 30, 100, 130],
        [40],
        [200, 230],
    ]


def test_shuffling_keeps_every_request_and_every_pause() -> None:
    before = conversation()
    after = shuffled(before, 1)
    assert sorted(map(str, (r.hash_ids for r in after))) == sorted(
        map(str, (r.hash_ids for r in before))
    )
    assert [r.timestamp for r in after] == sorted(r.timestamp for r in after)
    assert shuffled(before, 1) == after


def test_thinning_keeps_whole_sessions() -> None:
    before = conversation()
    assert thinned(before, 1.0, 1) == before
    assert thinned(before, 0.0, 1) == []


def test_merged_traces_share_no_block() -> None:
    one, other = conversation(), conversation()
    both = merged(one, other)
    assert len(both) == 14
    assert len({block for r in both for block in r.hash_ids}) == 2 * len(
        {block for r in one for block in r.hash_ids}
    )
    assert [r.timestamp for r in both] == sorted(r.timestamp for r in both)
