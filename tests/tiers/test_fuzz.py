"""Any bytes, in any file of a cache: it opens, refuses with a word, or loses single chunks.

Another process with little memory does all that can be done with the cache
(see `tests.tiers.fuzz_worker`), so that a crash, a hang and an allocation without
bounds are seen for what they are. ``KVSTORE_FUZZ=20000`` gives the number of examples.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.testing.bench import key_of
from kvstore.tiers.disk.format import (
    ALIGN,
    RECORD,
    RECORD_BYTES,
    Geometry,
    Header,
    checksummed,
    encode_header,
    parse_header,
    segment_seed,
)
from kvstore.types import MAX_KEY_BYTES
from tests.tiers.fuzzing import Bed, Worker, fuzz
from tests.tiers.support import (
    CHUNK,
    GEOMETRY,
    NAMESPACE,
    SEGMENT,
    SLOT,
    SLOTS,
    bench_of,
    lane_of,
    segment_of,
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    root = tmp_path_factory.mktemp("fuzz")
    sound = root / "sound"

    async def store() -> None:
        bench = bench_of(sound)
        assert (await bench.tier.grow())[0] == 1
        keys = [key_of(n) for n in range(2 * SLOTS)]
        assert all((await bench.store(keys, range(2 * SLOTS))).ok)
        await bench.close([(key, slot) for slot, key in enumerate(keys)])

    asyncio.run(store())
    worker = Worker()
    yield Bed(sound, (root / f"copy-{n}" for n in itertools.count()), worker)
    worker.end()


def test_the_worker_finds_nothing_wrong_with_a_sound_cache(bed: Bed) -> None:
    bed.try_with(lambda path: None)


def test_the_worker_notices_wrong_bytes(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(path: Path) -> None:
        """Put a sound chunk under the key of another, digest and all."""
        records = read_records(segment_of(path))
        records["key"][0] = records["key"][5]
        records["sequence"][0] = 10**6
        write_records(segment_of(path), records)

    with pytest.raises(AssertionError, match="wrong bytes"):
        bed.try_with(exchange)


# -- bytes ---------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, 1, 7, 8, 9, 127, 128, 4095, 4096, 4097, SEGMENT - 1, SEGMENT, SEGMENT + 1]),
    st.sampled_from([2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(0, SEGMENT),
    st.integers(0, 2**64 - 1),
)

OFFSETS = st.one_of(
    st.integers(0, 1023),
    st.integers(ALIGN, ALIGN + SLOTS * RECORD_BYTES - 1),
    st.integers(0, SEGMENT - 1),
)

SIZES = st.one_of(st.integers(0, SEGMENT), st.sampled_from([2 * SEGMENT, 2**30, 2**42]))


def read_records(file: Path) -> np.ndarray[Any, np.dtype[np.void]]:
    raw = file.read_bytes()[GEOMETRY.index_offset : GEOMETRY.index_offset + SLOTS * RECORD_BYTES]
    return np.frombuffer(raw, RECORD).copy()


def write_records(file: Path, records: np.ndarray[Any, np.dtype[np.void]]) -> None:
    """Write records back with a CRC that is right."""
    seed = segment_seed(parse_header(file.read_bytes()[:ALIGN], "own").segment_id)
    with file.open("r+b") as handle:
        handle.seek(GEOMETRY.index_offset)
        handle.write(checksummed(records, seed))


@fuzz
@given(content=st.binary(max_size=9000), size=SIZES, number=st.sampled_from([0, 1, 2]))
def test_any_bytes_as_a_segment(bed: Bed, content: bytes, size: int, number: int) -> None:
    def change(path: Path) -> None:
        segment_of(path, number).write_bytes(content)
        os.truncate(segment_of(path, number), size)

    bed.try_with(change)


@fuzz
@given(
    writes=st.lists(st.tuples(OFFSETS, st.binary(min_size=1, max_size=64)), min_size=1, max_size=6),
    size=st.none() | SIZES,
)
def test_a_segment_with_bytes_changed_anywhere_and_any_size(
    bed: Bed, writes: list[tuple[int, bytes]], size: int | None
) -> None:
    def change(path: Path) -> None:
        with segment_of(path).open("r+b") as file:
            for offset, content in writes:
                file.seek(offset)
                file.write(content)
            if size is not None:
                file.truncate(size)

    bed.try_with(change)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@fuzz
@given(
    slots=st.integers(1, 64) | st.sampled_from([2**10, 2**16]),
    slot_bytes=st.sampled_from([SLOT, 4096, 1, 2 * SLOT, 2**40]),
    chunk_bytes=st.sampled_from([CHUNK, SLOT, 1]),
    number=st.sampled_from([0, 1, 2]),
    whole=st.booleans(),
)
@example(slots=18, slot_bytes=SLOT, chunk_bytes=CHUNK, number=0, whole=False)
def test_a_sound_header_of_another_geometry(
    bed: Bed, slots: int, slot_bytes: int, chunk_bytes: int, number: int, whole: bool
) -> None:
    geometry = Geometry(slots, slot_bytes, min(chunk_bytes, slot_bytes))

    def change(path: Path) -> None:
        file = segment_of(path, number)
        file.touch()
        with file.open("r+b") as handle:
            handle.write(encode_header(Header(NAMESPACE.digest, "5a" * 16, geometry)))
            if whole and geometry.file_bytes < 2**43:
                handle.truncate(geometry.file_bytes)

    bed.try_with(change)


@pytest.mark.parametrize("slots", [2**21, 2**24, 2**28, 2**33])
def test_a_sparse_file_of_many_slots_takes_no_memory_to_speak_of(bed: Bed, slots: int) -> None:
    geometry = Geometry(slots, SLOT, CHUNK)

    def change(path: Path) -> None:
        with segment_of(path, 2).open("wb") as handle:
            handle.write(encode_header(Header(NAMESPACE.digest, "5a" * 16, geometry)))
            handle.truncate(min(geometry.file_bytes, 2**43))

    bed.try_with(change)


RECORD_FIELDS = {
    "version": 2,
    "state": 1,
    "key_length": 1,
    "slot": 4,
    "sequence": 8,
    "length": 8,
    "stored_ms": 8,
    "read_ms": 8,
    "reads": 4,
    "epoch": 4,
    "last": 4,
}


@fuzz
@given(
    changes=st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.sampled_from(sorted(RECORD_FIELDS)), NUMBERS),
        min_size=1,
        max_size=8,
    )
)
def test_records_with_a_right_crc_and_any_values(
    bed: Bed, changes: list[tuple[int, str, int]]
) -> None:
    def change(path: Path) -> None:
        records = read_records(segment_of(path))
        for slot, field, value in changes:
            value %= 256 ** RECORD_FIELDS[field]
            # A key that was cut and sealed again is another key as far as anybody can tell.
            if field == "key_length" and 1 <= value <= MAX_KEY_BYTES:
                value += MAX_KEY_BYTES
            records[field][slot] = value
        write_records(segment_of(path), records)

    bed.try_with(change)


@fuzz
@given(
    twins=st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_records_of_one_key_in_several_slots(bed: Bed, twins: list[tuple[int, int, bool]]) -> None:
    """With or without the same sequence, over payloads that are not theirs."""

    def change(path: Path) -> None:
        records = read_records(segment_of(path))
        for source, target, same in twins:
            sequence = records["sequence"][target]
            records[target] = records[source]
            records["slot"][target] = target
            if not same:
                records["sequence"][target] = sequence
            # The source's digest is not that of the payload which lies in the target.
        write_records(segment_of(path), records)

    bed.try_with(change)


# -- other files ---------------------------------------------------------------------------


@fuzz
@given(
    content=st.binary(max_size=200) | JSON.map(lambda v: json.dumps(v).encode()),
    size=st.none() | SIZES,
)
def test_any_bytes_as_namespace_file(bed: Bed, content: bytes, size: int | None) -> None:
    def change(path: Path) -> None:
        file = lane_of(path).parent / "namespace.json"
        file.write_bytes(content)
        if size is not None:
            os.truncate(file, size)

    bed.try_with(change)


@fuzz
@given(field=st.sampled_from(["format", "version", "digest", "identity", "new"]), value=JSON)
def test_a_namespace_file_with_any_value_in_any_field(bed: Bed, field: str, value: Any) -> None:
    def change(path: Path) -> None:
        file = lane_of(path).parent / "namespace.json"
        told = json.loads(file.read_bytes())
        told[field] = value
        file.write_text(json.dumps(told))

    bed.try_with(change)


@fuzz
@given(content=st.binary(max_size=64), size=st.none() | SIZES)
def test_any_bytes_as_lock(bed: Bed, content: bytes, size: int | None) -> None:
    def change(path: Path) -> None:
        (lane_of(path) / "lock").write_bytes(content)
        if size is not None:
            os.truncate(lane_of(path) / "lock", size)

    bed.try_with(change)


def make_file(place: Path) -> None:
    place.write_bytes(b"x" * 100)


def make_folder(place: Path) -> None:
    place.mkdir()
    (place / "inside").write_text("somebody's")


def make_pipe(place: Path) -> None:
    os.mkfifo(place)


def make_link(place: Path) -> None:
    place.symlink_to("/etc/passwd")


def make_loop(place: Path) -> None:
    place.symlink_to(place.name)


def make_socket(place: Path) -> None:
    at = os.getcwd()
    os.chdir(place.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
    finally:
        os.chdir(at)


def make_copy(place: Path) -> None:
    lane = next(parent for parent in (place.parent, *place.parents) if parent.name == "lane-0")
    shutil.copy(lane / "segment-0.safetensors", place)


KINDS = [make_file, make_folder, make_pipe, make_link, make_loop, make_socket]

NAMES = st.one_of(
    st.sampled_from(
        [
            "segment-2.safetensors",
            "segment-02.safetensors",
            "segment--1.safetensors",
            "segment-999999999.safetensors",
            "segment-9999999999.safetensors",
            "segment-2.safetensors\n",
            "segment-1٢.safetensors",
            "segment-2.SAFETENSORS",
            ".segment-2.0123abcd.tmp",
            ".segment-٢.0123abcd.tmp",
            ".probe-1-ab",
            "...",
            "segment-\udcff.safetensors",
            "name\nwith a line",
        ]
    ),
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40
    ).filter(lambda name: name not in (".", "..", "lock") and len(name.encode()) < 200),
)


@fuzz
@given(name=NAMES, kind=st.sampled_from([*KINDS, make_copy]))
def test_anything_under_any_name_in_a_lane(
    bed: Bed, name: str, kind: Callable[[Path], None]
) -> None:
    def change(path: Path) -> None:
        place = lane_of(path) / name
        if not os.path.lexists(place):
            kind(place)

    bed.try_with(change)


LANES = ["lane-1", "lane-7", "lane-63", "lane-64", "lane-9999", "lane-01", "lane-٣", "lane-", "x"]


@fuzz
@given(name=st.sampled_from(LANES), kind=st.sampled_from([*KINDS, shutil.copytree]))
def test_anything_in_place_of_a_lane(bed: Bed, name: str, kind: Callable[..., Any]) -> None:
    def change(path: Path) -> None:
        place = lane_of(path).parent / name
        if kind is shutil.copytree:
            shutil.copytree(lane_of(path), place)
        else:
            kind(place)

    bed.try_with(change)


FILES = ["namespace.json", "lane-0/lock", "lane-0/segment-0.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_something_else_in_place_of_each_file(
    bed: Bed, name: str, kind: Callable[[Path], None]
) -> None:
    """A pipe holds nobody up."""

    def change(path: Path) -> None:
        place = lane_of(path).parent / name
        place.unlink()
        kind(place)

    bed.try_with(change)


@pytest.mark.parametrize("sequence", [2**64 - 20, 2**64 - 2, 2**64 - 1])
def test_a_record_with_one_of_the_highest_sequences(bed: Bed, sequence: int) -> None:
    def change(path: Path) -> None:
        records = read_records(segment_of(path))
        records["sequence"][4] = sequence
        write_records(segment_of(path), records)

    bed.try_with(change)
