"""Format 1: headers, records, and what other programs see."""

from __future__ import annotations

import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ForeignFileError
from kvstore.testing.bench import key_of
from kvstore.tiers.disk.format import (
    ALIGN,
    MAX_SLOTS,
    RECORD_BYTES,
    Geometry,
    Header,
    decode_records,
    encode_header,
    encode_records,
    live_chunks,
    parse_header,
    segment_seed,
    used_record,
)
from kvstore.tiers.disk.index import IndexFile
from kvstore.types import MAX_KEY_BYTES
from tests.tiers.conftest import OpenBench
from tests.tiers.support import CHUNK, SLOT, SLOTS, segment_of

SEGMENT_ID = "00112233445566778899aabbccddeeff"
SEED = segment_seed(SEGMENT_ID)

keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
digests = st.binary(min_size=16, max_size=16)
segment_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)


def one_record(key: bytes = b"a key\0\0\0\0", slot: int = 3) -> bytes:
    return encode_records([key], slot, 41, CHUNK, [bytes(range(16))], SEED)


# -- records -------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(keys, digests), min_size=1, max_size=20),
    st.integers(0, 2**31),
    st.integers(0, 2**62),
    st.integers(1, 2**40),
    segment_ids,
)
def test_records_read_back_as_they_were_written(
    chunks: list[tuple[bytes, bytes]], first: int, sequence: int, length: int, segment_id: str
) -> None:
    seed = segment_seed(segment_id)
    its_keys, its_digests = [key for key, _ in chunks], [digest for _, digest in chunks]
    raw = encode_records(its_keys, first, sequence, length, its_digests, seed)
    assert len(raw) == RECORD_BYTES * len(chunks)
    live = decode_records(raw, first, length, seed)
    assert live.keys() == its_keys
    assert live.digests() == its_digests
    assert live.slots == list(range(first, first + len(chunks)))
    assert live.records["sequence"].tolist() == list(range(sequence, sequence + len(chunks)))
    assert live.damaged == []


@pytest.mark.parametrize("bit", range(8))
def test_no_record_with_a_flipped_bit_is_valid(bit: int) -> None:
    for byte in range(RECORD_BYTES):
        raw = bytearray(one_record())
        raw[byte] ^= 1 << bit
        live = decode_records(bytes(raw), 3, CHUNK, SEED)
        assert live.slots == []
        assert live.damaged == [3]


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES * 8))
def test_random_bytes_are_no_records(raw: bytes) -> None:
    assert decode_records(raw, 0, CHUNK, SEED).slots == []


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_record_is_valid_in_its_own_slot_alone(slot: int, other: int) -> None:
    live = decode_records(one_record(slot=slot), other, CHUNK, SEED)
    its = slot == other
    assert (live.slots, live.damaged) == (([slot], []) if its else ([], [other]))


@given(segment_ids, segment_ids)
def test_a_record_is_valid_in_its_own_segment_alone(ours: str, theirs: str) -> None:
    raw = encode_records([b"key"], 0, 0, CHUNK, [bytes(16)], segment_seed(ours))
    live = decode_records(raw, 0, CHUNK, segment_seed(theirs))
    assert live.slots == ([0] if ours == theirs else [])


def test_a_record_of_another_payload_length_is_damaged() -> None:
    assert decode_records(one_record(), 3, CHUNK + 1, SEED).damaged == [3]


def test_zeros_are_empty_slots_and_not_damage() -> None:
    live = decode_records(bytes(RECORD_BYTES * 5), 0, CHUNK, SEED)
    assert live.slots == live.damaged == []
    assert live.keys() == live.digests() == []


def test_a_damaged_record_costs_its_neighbours_nothing() -> None:
    raw = bytearray(encode_records([b"a", b"b", b"c"], 0, 0, CHUNK, [bytes(16)] * 3, SEED))
    raw[RECORD_BYTES + 70] ^= 0x80
    live = decode_records(bytes(raw), 0, CHUNK, SEED)
    assert live.keys() == [b"a", b"c"]
    assert live.slots == [0, 2]
    assert live.damaged == [1]


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES - 1, RECORD_BYTES + 1])
def test_records_that_are_cut_off_are_not_there(size: int) -> None:
    raw = encode_records([b"a", b"b"], 0, 0, CHUNK, [bytes(16)] * 2, SEED)[:size]
    assert decode_records(raw, 0, CHUNK, SEED).slots == list(range(size // RECORD_BYTES))


# -- headers -------------------------------------------------------------------------------

geometries = st.builds(
    lambda slots, pages, short: Geometry(slots, pages * ALIGN, pages * ALIGN - short),
    st.integers(1, MAX_SLOTS),
    st.integers(1, 2**20),
    st.integers(0, ALIGN - 1),
)
headers = st.builds(
    Header, st.binary(min_size=32, max_size=32).map(bytes.hex), segment_ids, geometries
)


@given(headers)
def test_a_header_reads_back_as_it_was_written(header: Header) -> None:
    page = encode_header(header)
    assert len(page) == ALIGN
    assert parse_header(page, "segment") == header


@given(headers, st.integers(0, ALIGN * 8 - 1))
def test_a_header_with_a_flipped_bit_is_refused_or_reads_as_another(
    header: Header, bit: int
) -> None:
    page = bytearray(encode_header(header))
    page[bit // 8] ^= 1 << bit % 8
    try:
        found = parse_header(bytes(page), "segment-7")
    except ForeignFileError:
        return
    # Another name is another segment: what was stored under this one is not served.
    assert found != header
    assert found.geometry.file_bytes == header.geometry.file_bytes


def page_of(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return (struct.pack("<Q", ALIGN - 8) + raw.ljust(ALIGN - 8))[:ALIGN]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.binary(max_size=ALIGN + 50)
    | st.binary(max_size=ALIGN).map(page_of)
    | json_values.map(json.dumps).map(page_of)
    | st.integers(0, 2000).map(lambda depth: page_of("[" * depth))
)
def test_whatever_is_no_header_is_a_foreign_file_and_nothing_worse(page: bytes) -> None:
    with pytest.raises(ForeignFileError):
        parse_header(page, "segment-0")


@pytest.mark.parametrize("text", ["[" * 4088, '{"a":' * 800])
def test_a_header_that_goes_too_deep_is_a_foreign_file(text: str) -> None:
    """Hypothesis lets programs go deeper than they may elsewhere."""
    with pytest.raises(ForeignFileError):
        parse_header(page_of(text), "segment-0")


@settings(max_examples=300)
@given(st.data())
def test_a_header_with_any_other_value_is_a_foreign_file_and_nothing_worse(
    data: st.DataObject,
) -> None:
    told = json.loads(encode_header(Header("ab" * 32, SEGMENT_ID, Geometry(8, SLOT, CHUNK)))[8:])
    its = told[data.draw(st.sampled_from(sorted(told)))]
    name = data.draw(st.sampled_from([*sorted(its), "new"]))
    old = its.get(name)
    its[name] = data.draw(
        json_values
        | st.integers().map(str)
        | st.sampled_from(["\u00e9" * 700, "9" * 900, "1" + "0" * 400, 1e308 * 10])
        | st.sampled_from([" 8", "8 ", "08", "+8", "0x8", "8_0"])
        | st.sampled_from(["-1", "\u0668", "NaN", "", 2**64, -(2**63)])
    )
    page = page_of(json.dumps(told, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if its[name] == old:
        return
    with pytest.raises(ForeignFileError):
        parse_header(page, "segment-0")


def test_a_newer_version_is_refused_by_name() -> None:
    told = json.loads(encode_header(Header("ab" * 32, SEGMENT_ID, Geometry(8, SLOT, CHUNK)))[8:])
    told["__metadata__"]["version"] = "3"
    with pytest.raises(
        ForeignFileError, match="format version '3'; this program reads versions 1 and 2"
    ):
        parse_header(page_of(json.dumps(told)), "segment-0")


# -- sizes ---------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 2**11))
def test_a_geometry_fills_the_segment_and_never_exceeds_it(size: int, pages: int) -> None:
    slot = pages * ALIGN
    geometry = Geometry.fitting(size, slot, slot)
    if geometry.slots:
        assert geometry.file_bytes <= size
    assert Geometry(geometry.slots + 1, slot, slot).file_bytes > size
    assert geometry.blocks_offset % ALIGN == 0


# -- what others see -----------------------------------------------------------------------


async def test_a_segment_is_a_safetensors_file(folder: Path, open_bench: OpenBench) -> None:
    bench = open_bench()
    await bench.store([key_of(5)], [2])
    with safetensors.safe_open(segment_of(folder), "numpy") as file:
        assert {"index", "blocks"} <= set(file.keys()) <= {"index", "blocks", "padding"}
        index, blocks = file.get_tensor("index"), file.get_tensor("blocks")
        metadata = file.metadata()
    assert index.dtype == blocks.dtype == np.uint8
    assert index.shape == (SLOTS, RECORD_BYTES)
    assert blocks.shape == (SLOTS, SLOT)
    assert metadata["format"] == "kvstore segment"
    assert bytes(blocks[2]) == bytes(bench.region.row(0))
    live = decode_records(index.tobytes(), 0, CHUNK, segment_seed(metadata["segment"]))
    assert live.slots == [2]
    assert live.keys() == [key_of(5)]


@pytest.mark.parametrize("slots", [1, 7, 32, 33])
def test_any_number_of_slots_makes_a_safetensors_file(tmp_path: Path, slots: int) -> None:
    geometry = Geometry(slots, ALIGN, 100)
    file = tmp_path / "segment-0.safetensors"
    with open(file, "wb") as handle:
        handle.write(encode_header(Header("ab" * 32, SEGMENT_ID, geometry)))
        handle.truncate(geometry.file_bytes)
    tensors: dict[str, Any] = safetensors.numpy.load_file(file)
    assert tensors["index"].shape == (slots, RECORD_BYTES)
    assert tensors["blocks"].shape == (slots, ALIGN)


async def test_keys_that_end_in_zeros_are_whole_for_other_readers(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    its_keys = [b"hash" + b"\0" * count for count in range(5)]
    await bench.store(its_keys, range(5))
    with safetensors.safe_open(segment_of(folder), "numpy") as file:
        raw = file.get_tensor("index").tobytes()
        seed = segment_seed(file.metadata()["segment"])
    assert decode_records(raw, 0, CHUNK, seed).keys() == its_keys


@given(st.binary(min_size=0, max_size=4 * RECORD_BYTES), st.integers(0, 3), st.data())
def test_the_fast_way_of_reading_records_says_the_same_as_the_thorough_one(
    noise: bytes, first: int, data: st.DataObject
) -> None:
    from kvstore.tiers.disk.format import live_chunks

    keys = [b"k" * (1 + index) for index in range(3)]
    raw = encode_records(keys, first, 7, 100, [bytes([i]) * 16 for i in range(3)], 5)
    at = data.draw(st.integers(0, len(raw)))
    # Also where records are found in other slots than their own.
    mixtures = [raw, noise, raw[:at] + noise, noise[:at] + raw]
    for mixed, place in itertools.product(mixtures, (first, first + 1)):
        live = decode_records(mixed, place, 100, 5)
        told = dict(zip(live.slots, zip(live.keys(), live.digests(), strict=True), strict=True))
        assert live_chunks(mixed, place, 100, 5) == told


def test_an_earlier_use_does_not_replace_a_later_one() -> None:
    key = b"a key\0\0\0\0"
    later = used_record(one_record(key), 3, key, SEED, 50, 2**45, 2)
    assert later is not None
    clock_was_set_back = used_record(later, 3, key, SEED, 51, 2**44, 3)
    assert clock_was_set_back is not None
    (record,) = decode_records(clock_was_set_back, 3, CHUNK, SEED).records
    assert (record["read_ms"], record["reads"], record["sequence"]) == (2**45, 5, 51)


def test_a_record_that_was_being_written_is_looked_at_again(tmp_path: Path) -> None:
    geometry = Geometry(SLOTS, SLOT, CHUNK)
    file = tmp_path / "segment"
    whole = one_record(slot=3)
    # What a reader may find: the end of the record is there, its beginning is not yet.
    half = bytes(64) + whole[64:]
    file.write_bytes(bytes(geometry.file_bytes))
    index = IndexFile(os.open(file, os.O_RDWR), Header("n", SEGMENT_ID, geometry))
    known = np.zeros(SLOTS, np.uint32)
    try:
        index.write(3, half)
        assert [live.slots for _, live in index.changes(known, 0)] == [[]]
        index.write(3, whole)
        assert [(slots, live.slots) for slots, live in index.changes(known, 0)] == [([3], [3])]
        assert list(index.changes(known, 0)) == []
    finally:
        index.close()


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_quick_way_finds_what_is_of_its_epoch_alone(epoch: int) -> None:
    names = [b"key-%d" % n for n in range(4)]
    raw = b"".join(
        encode_records([name], n, n, CHUNK, [bytes(16)], SEED, epoch=[0, 1, 7, 1][n])
        for n, name in enumerate(names)
    )
    live = decode_records(raw, 0, CHUNK, SEED).of_epoch(epoch)
    slow = dict(zip(live.slots, zip(live.keys(), live.digests(), strict=True), strict=True))
    assert live_chunks(raw, 0, CHUNK, SEED, epoch) == slow
    assert slow


def test_records_are_written_whole_by_calls_that_write_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(SLOTS, SLOT, CHUNK)
    file = tmp_path / "segment"
    file.write_bytes(bytes(geometry.file_bytes))
    index = IndexFile(os.open(file, os.O_RDWR), Header("n", SEGMENT_ID, geometry))
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:100], at))
    try:
        names = [b"key-%d" % n for n in range(4)]
        index.write(2, encode_records(names, 2, 0, CHUNK, [bytes(16)] * 4, SEED))
        assert index.live().keys() == names
        index.erase(2, 4)
        assert (index.live().slots, index.live().damaged) == ([], [])
    finally:
        index.close()


@given(
    names=st.lists(st.binary(min_size=1, max_size=56), min_size=1, max_size=5, unique=True),
    seals=st.lists(st.binary(min_size=28, max_size=28), min_size=5, max_size=5),
    first=st.integers(0, 1000),
    epoch=st.integers(0, 2**32 - 1),
)
def test_a_sealed_record_gives_back_its_seal_and_counts_as_no_other(
    names: list[bytes], seals: list[bytes], first: int, epoch: int
) -> None:
    seals = seals[: len(names)]
    raw = encode_records(names, first, 7, CHUNK, seals, SEED, epoch)
    live = decode_records(raw, first, None, SEED)
    assert (live.keys(), live.digests(), live.damaged) == (names, seals, [])
    assert [bytes(nonce) for nonce in live.nonces()] == [seal[16:] for seal in seals]
    assert live.key_ids() == [seal[16:20].hex() for seal in seals]
    quick = live_chunks(raw, first, None, SEED, epoch)
    assert quick == {first + n: each for n, each in enumerate(zip(names, seals, strict=True))}
    # Where payloads are not sealed it is damage, and the other way round.
    assert decode_records(raw, first, CHUNK, SEED).slots == []
    assert live_chunks(raw, first, CHUNK, SEED, epoch) == {}
    plain = encode_records(names, first, 7, CHUNK, [seal[:16] for seal in seals], SEED, epoch)
    assert decode_records(plain, first, None, SEED).slots == []
    used = used_record(raw[:RECORD_BYTES], first, names[0], SEED, 9, 10, 1)
    assert used is not None
    assert decode_records(used, first, None, SEED).digests() == seals[:1]
