"""Traces are read in every form; what is none is refused by name and line."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import random
import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import TraceError
from kvstore.observe.recording import MAGIC
from kvstore.simulation import Trace, read_trace, sample
from kvstore.simulation.numbering import Numbering
from kvstore.simulation.sample import anchors
from tests.simulation.traces import conversations

REQUESTS = [[7, 8, 9], [7, 8, 10], [11]]


def mooncake() -> bytes:
    lines = [
        {"timestamp": 1000 * number, "input_length": 3, "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(REQUESTS)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def packed() -> bytes:
    return b"""{"block_tokens": 64, "requests": 3, "blocks": 7, "unique": 5}
[0, 192, 1, -1, 0, 3]
[1000, 192, 1, 0, 2, 1]
[2000, 64, 1, -1, 0, 1]
"""


PACKED = b'{"block_tokens": 64}\n'


@pytest.mark.parametrize("content", [mooncake(), packed()], ids=["mooncake", "packed"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_every_form_and_compression_is_read(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    packs: dict[str, Callable[[bytes], bytes]] = {
        ".jsonl": bytes,
        ".jsonl.gz": gzip.compress,
        ".jsonl.xz": lzma.compress,
    }
    pack = packs[suffix]
    path.write_bytes(pack(content))
    trace = read_trace(path)
    assert [list(chunks) for chunks in trace.requests] == [[0, 1, 2], [0, 1, 3], [4]]
    assert trace.times == [0.0, 1.0, 2.0]
    assert (trace.unique, trace.accesses) == (5, 7)
    assert len(set(trace.keys())) == 5
    assert len(read_trace(path, limit=2).requests) == 2


def test_time_does_not_go_back() -> None:
    assert Trace.of("t", [(5.0, [1]), (3.0, [2])]).times == [5.0, 5.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no requests"),
        (b"\x00\x01\x02\n", "line 1: not a trace"),
        (b"hello\n", "line 1: not a trace"),
        (b"{}\n", "line 1: not a request; an object with timestamp and hash_ids"),
        (mooncake() + b"[1, 2]\n", "line 4: not a request"),
        (b'{"hash_ids": 3}\n', "line 1: hash_ids must be a list"),
        (b'{"hash_ids": [[1]]}\n', "line 1: hash_ids must be a list"),
        (b'{"hash_ids": [1], "timestamp": "now"}\n', "line 1: timestamp must be a number"),
        (b'{"block_tokens": 64}\n[0, 1]\n', "line 2: not a packed request; six numbers"),
        (b'{"block_tokens": 64}\n[0, 1, 1, 5, 2, 1]\n', "line 2: keeps 2 ids of request 5"),
        (b"[" * 100_000, "line 1: not a trace"),
        (b'{"hash_ids": [1.5]}\n', "line 1: hash_ids must be a list of whole numbers"),
        (b'{"hash_ids": [true]}\n', "line 1: hash_ids must be a list of whole numbers"),
        (b'{"hash_ids": [1], "timestamp": Infinity}\n', "line 1: timestamp must be .* not inf"),
        (b'{"hash_ids": [1], "timestamp": 1e400}\n', "line 1: timestamp must be .* not inf"),
        (b'{"hash_ids": [1], "timestamp": NaN}\n', "line 1: timestamp must be .* not nan"),
        (b'{"hash_ids": [1], "timestamp": -1}\n', "line 1: timestamp must be .* from 0 to"),
        (PACKED + b"[0, 1, 1, -1, 0, 1]\n[1, 1, 1, 0.0, 1, 1]\n", "line 3: ref must be a whole"),
        (PACKED + b"[0, 1, 1, -1, 0, 1e15]\n", "line 2: new must be a whole number .* not 1000000"),
        (PACKED + b"[0, 1, 1, -1, 0, 1000000000000000]\n", "line 2: keep and new must be at most"),
        (PACKED + b"[0, 1, 1, -1, 0, -1]\n", "line 2: new must be a whole number of at least 0"),
        (PACKED + b"[0, 1, 1, -1, Infinity, 1]\n", "line 2: keep must be a whole .* not inf"),
        (PACKED + b"[0, 1, 1, 1" + b"0" * 99 + b", 1, 1]\n", "line 2: keeps 1 ids of request"),
        (PACKED + b"[1" + b"0" * 400 + b", 1, 1, -1, 0, 1]\n", "line 2: timestamp must be"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value)


NUMBERS = st.integers() | st.floats() | st.sampled_from([2**22, 1e15, 10**400, -1, 0.0, True])
VALUES = st.recursive(
    st.none() | st.text(max_size=3) | NUMBERS, lambda inner: st.lists(inner, max_size=3)
)
FIELDS = st.fixed_dictionaries({}, optional={"timestamp": VALUES, "hash_ids": VALUES})
LINES = st.lists(st.lists(st.integers(-2, 4) | VALUES, min_size=6, max_size=6), max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FIELDS, max_size=3) | LINES.map(lambda lines: [{"block_tokens": 64}, *lines]))
def test_any_values_are_read_or_refused_by_file_and_line(tmp_path: Path, values: list[Any]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    trace: Trace | None = None
    told = ""
    try:
        trace = read_trace(path)
    except TraceError as refusal:
        told = str(refusal)
    if trace is None:
        assert re.match(rf"{re.escape(str(path))}(, line \d+)?: ", told)
        assert len(told) < len(str(path)) + 350
    else:
        assert all(map(math.isfinite, trace.times))
        assert trace.unique < 5 * 2**22


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_compression_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    whole = (gzip.compress if suffix == ".gz" else lzma.compress)(mooncake() * 100)
    for content in (whole[: len(whole) // 2], b"plain text"):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="compression is damaged|cannot be read|not a trace"):
            read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_a_sample_keeps_conversations_whole() -> None:
    trace = conversations(1, sessions=200, turns=2000)
    part = sample(trace, 0.3)
    assert 0.1 * len(trace.requests) < len(part.requests) < 0.6 * len(trace.requests)
    assert part.times == sorted(part.times)
    assert len(sample(trace, 1.0).requests) == len(trace.requests)
    assert sample(trace, 0.3, seed=1).times != part.times
    assert len(sample(trace, 1e-9).requests) >= 1


@pytest.mark.parametrize(("sessions", "turns"), [(40, 100), (12, 8), (300, 3), (8, 150), (5, 100)])
def test_a_sample_keeps_long_conversations_behind_one_system_prompt_whole(
    sessions: int, turns: int
) -> None:
    """So room for all brings what it would bring for the whole trace."""
    rng, system = random.Random(1), list(range(20))
    history, fresh = dict.fromkeys(range(sessions), system), 20
    requests: list[tuple[float, list[int]]] = []
    for session in rng.sample(list(range(sessions)) * turns, sessions * turns):
        history[session] = [*history[session], fresh, fresh + 1]
        fresh += 2
        requests.append((float(len(requests)), history[session]))
    trace = Trace.of("agents", requests)
    firsts = {chunks[20] for chunks in trace.requests}
    assert set(anchors(trace)) == firsts
    for seed in range(4):
        part = sample(trace, 0.5, seed)
        kept = set(anchors(part))
        assert len(part.requests) == turns * len(kept)


def test_a_document_of_which_many_ask_is_sampled_as_a_whole() -> None:
    documents = [list(range(10 * n, 10 * n + 10)) for n in range(200)]
    requests = [(float(n), [*documents[n % 200], 5000 + n]) for n in range(200 * 20)]
    assert len(set(anchors(Trace.of("documents", requests)))) == 200


# -- large traces ----------------------------------------------------------------------------

HASHES = st.lists(st.lists(st.integers(0, 30) | st.sampled_from([2**63, 2**64 - 1])))


@given(HASHES)
def test_hashes_are_numbered_in_order_of_first_appearance(batches: list[list[int]]) -> None:
    numbering = Numbering()
    numbers: dict[int, int] = {}
    for batch in batches:
        expected = [numbers.setdefault(one, len(numbers)) for one in batch]
        assert numbering.number(np.array(batch, np.uint64)).tolist() == expected
    assert numbering.count == len(numbers)


@given(st.lists(st.lists(st.integers(-3, 3) | st.sampled_from(["1", "a", 2**70, "\ud800"]))))
def test_ids_of_any_kind_keep_apart(requests: list[list[int | str]]) -> None:
    trace = Trace.of("t", [(0.0, ids) for ids in requests])
    numbers: dict[int | str, int] = {}
    expected = [
        list(dict.fromkeys(numbers.setdefault(one, len(numbers)) for one in ids))
        for ids in requests
    ]
    assert [list(chunks) for chunks in trace.requests] == expected
    assert trace.unique == len(numbers)


def large_recording(path: Path, size: int) -> None:
    """Conversations whose prompts grow: one chunk in six is new."""
    rng = np.random.default_rng(1)
    data = bytearray(MAGIC + b'{"chunk_bytes": 4096}\n')
    while len(data) < size:
        session = rng.integers(0, 2**64, 600, dtype=np.uint64)
        for end in range(60, 601, 60):
            body = struct.pack("<dII", 0.0, 1, end) + session[:end].tobytes()
            data += struct.pack("<II", len(body), zlib.crc32(body)) + body
    path.write_bytes(data)


def test_a_recording_is_read_in_less_memory_than_it_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = tmp_path / "large", 2**23
    large_recording(path, size)
    monkeypatch.setattr("kvstore.simulation.trace.AT_ONCE", 2**14)
    monkeypatch.setattr("kvstore.observe.recording.READ_BYTES", 2**16)
    tracemalloc.start()
    try:
        trace = read_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.accesses > size / 10
    assert peak < size


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    large_recording(tmp_path / "plain", 2**16)
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".xz": lzma.compress,
    }
    pack = packs[suffix]
    path.write_bytes(pack((tmp_path / "plain").read_bytes()))
    told: list[tuple[int, int]] = []
    read_trace(path, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_a_limit_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "large"
    large_recording(path, 2**22)
    told = [0]
    trace = read_trace(path, limit=3, progress=lambda done, _: told.append(done))
    assert len(trace.requests) == 3
    assert max(told) < 2**22
