"""The codec: what it does to numbers, and disks and stores whose chunks are encoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import assembly
from kvstore.errors import ConfigError
from kvstore.gate import FORMAT, Gate
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.maintenance.survey import survey
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.codec import DTYPES, Codec
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.pinned import round_to_page
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tools.cli import main
from tests.tiers.support import NAMESPACE, segment_of, some_keys

CHUNK = 65536
PLAIN = Geometry(8, CHUNK, CHUNK)
"""A segment without a codec."""

KEYS = [key_of(number) for number in range(24)]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def numbers_of(raw: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


def raw_of(numbers: npt.NDArray[Any], dtype: str) -> bytes:
    if dtype == "float16":
        return numbers.astype(np.float16).tobytes()
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def through(codec: Codec, raw: bytes) -> bytes:
    memory = memoryview(bytearray(max(len(raw), codec.coded_bytes(len(raw)))))
    codec.encode(memoryview(raw), memory)
    codec.decode(memory, len(raw))
    return bytes(memory[: len(raw)])


def kv(key: bytes, size: int = CHUNK) -> bytes:
    """Numbers as a KV cache has them, by key."""
    seed = int.from_bytes(key[:8], "little")
    return raw_of(np.random.default_rng(seed).standard_normal(size // 2), "bfloat16")


def is_near(found: bytes, wanted: bytes, dtype: str = "bfloat16") -> bool:
    """Whether each number is off by half a scale at most, and by the rounding of its type."""
    ours, theirs = numbers_of(found, dtype), numbers_of(wanted, dtype)
    padded = np.zeros(-(-len(theirs) // 64) * 64, np.float32)
    padded[: len(theirs)] = np.abs(theirs)
    largest = padded.reshape(-1, 64).max(axis=1).repeat(64)[: len(theirs)]
    bound = largest / 127 * (1 + 2**-20) / 2 + np.abs(theirs) * 2.0**-8 + 2.0**-24
    return bool((np.abs(ours - theirs) <= bound).all())


@BY_DTYPE
@pytest.mark.parametrize("compiled", [True, False])
@given(power=st.integers(-20, 8), size=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_numbers_come_back_within_half_a_scale(
    dtype: str, compiled: bool, power: int, size: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed).standard_normal(size) * 2.0**power
    raw = raw_of(numbers, dtype)
    assert is_near(through(Codec(dtype, compiled=compiled), raw), raw, dtype)


@BY_DTYPE
@pytest.mark.parametrize("compiled", [True, False])
@given(raw=st.binary(min_size=2, max_size=600).filter(lambda raw: len(raw) % 2 == 0))
@settings(max_examples=300, deadline=None)
def test_what_was_encoded_once_stays_as_it_is(dtype: str, compiled: bool, raw: bytes) -> None:
    """However often it goes from host memory to disk and back."""
    codec = Codec(dtype, compiled=compiled)
    once = through(codec, raw)
    assert through(codec, once) == once


@pytest.mark.parametrize("compiled", [True, False])
def test_small_numbers_come_back_whatever_a_thread_does_with_them(compiled: bool) -> None:
    """Threads flush numbers that are not normal to 0 where a library has said so."""
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).standard_normal(64 * 64) * 5e-5
    numbers[::64] = 2e-4
    raw = raw_of(numbers, "float16")
    wanted = through(Codec("float16", compiled=compiled), raw)
    before = torch.tensor([1e-40]).mul(1).item() == 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush them")
    try:
        # It begins as the thread that starts it.
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(through, Codec("float16", compiled=compiled), raw).result()
    finally:
        torch.set_flush_denormal(before)
    assert found == wanted
    assert is_near(found, raw, "float16")


@pytest.mark.skipif(not Codec("bfloat16").compiled, reason="installed without a C compiler")
@BY_DTYPE
@given(raw=st.binary(min_size=2, max_size=600).filter(lambda raw: len(raw) % 2 == 0))
@settings(max_examples=300, deadline=None)
def test_whatever_the_bits_are_both_codes_give_the_same(dtype: str, raw: bytes) -> None:
    coded = []
    for codec in (Codec(dtype), Codec(dtype, compiled=False)):
        memory = memoryview(bytearray(max(len(raw), codec.coded_bytes(len(raw)))))
        codec.encode(memoryview(raw), memory)
        coded.append(bytes(memory))
        codec.decode(memory, len(raw))
        coded.append(bytes(memory[: len(raw)]))
    assert coded[:2] == coded[2:]


@BY_DTYPE
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("wild", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_comes_back_as_none_and_leaves_other_groups_alone(
    dtype: str, compiled: bool, wild: float
) -> None:
    numbers = np.ones(192)
    numbers[70] = wild
    found = numbers_of(through(Codec(dtype, compiled=compiled), raw_of(numbers, dtype)), dtype)
    assert np.isnan(found[64:128]).all()
    assert (found[:64] == 1).all()
    assert (found[128:] == 1).all()


@BY_DTYPE
@pytest.mark.parametrize("compiled", [True, False])
def test_the_largest_numbers_stay_numbers(dtype: str, compiled: bool) -> None:
    largest = {"bfloat16": 0x7F7F, "float16": 0x7BFF}[dtype]
    raw = np.full(64, largest, np.uint16).tobytes()
    found = numbers_of(through(Codec(dtype, compiled=compiled), raw), dtype)
    assert np.isfinite(found).all()
    assert (found > 0.99 * numbers_of(raw, dtype)).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_memory_that_is_too_small_is_refused(compiled: bool) -> None:
    codec = Codec("bfloat16", compiled=compiled)
    assert codec.coded_bytes(256) == 132
    for chunk, out in ((256, 131), (255, 200)):
        with pytest.raises(ValueError, match="the target is too small, or the source"):
            codec.encode(memoryview(bytes(chunk)), memoryview(bytearray(out)))
    for memory, size in ((255, 256), (300, 255), (10, 2)):
        with pytest.raises(ValueError, match="the memory is too small, or holds"):
            codec.decode(memoryview(bytearray(memory)), size)


class Opener:
    """Opens the tests' tier with a codec; what is left open is let go of at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.benches: list[TierBench] = []

    def open(self, **options: Any) -> tuple[TierBench, DiskTier]:
        tier = DiskTier(
            self.folder,
            NAMESPACE,
            CHUNK,
            PLAIN.file_bytes,
            segment_bytes=PLAIN.file_bytes,
            codec=Codec("bfloat16"),
            **options,
        )
        bench = TierBench(tier, len(KEYS), CHUNK, CHUNK)
        self.benches.append(bench)
        return bench, tier


@pytest.fixture
def opener(folder: Path) -> Iterator[Opener]:
    opener = Opener(folder)
    yield opener
    for bench in opener.benches:
        bench.abandon()


async def write(bench: TierBench, keys: Sequence[bytes]) -> None:
    for row, key in enumerate(keys):
        bench.region.row(row)[:CHUNK] = kv(key)
    done = await bench.tier.write(keys, range(len(keys)), range(len(keys)))
    assert all(done.ok), done.error


@pytest.mark.parametrize("io", ["portable", "buffered", "direct", "mmap", "aio"])
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_tier_holds_nearly_twice_as_many_chunks_and_finds_them_after_a_restart(
    opener: Opener, tmp_path: Path, io: str, sealed: bool
) -> None:
    options: dict[str, Any] = {"io": io}
    if sealed:
        options["keys"] = some_keys(tmp_path)
    try:
        bench, tier = opener.open(**options)
    except ConfigError as error:
        pytest.skip(str(error))
    keys = KEYS[: tier.geometry.slots]
    assert len(keys) == 14, "8 without a codec"
    await write(bench, keys)
    await bench.close()
    assert segment_of(opener.folder).stat().st_size <= PLAIN.file_bytes
    again, _ = opener.open(**options)
    found = dict(again.opening.entries)
    assert set(found) == set(keys)
    loaded = await again.tier.read(keys, [found[key] for key in keys], range(len(keys)))
    assert all(loaded.ok), loaded.error
    for row, key in enumerate(keys):
        assert is_near(bytes(again.region.row(row)[:CHUNK]), kv(key))


async def test_a_damaged_payload_is_refused_before_it_is_decoded(opener: Opener) -> None:
    bench, tier = opener.open()
    await write(bench, KEYS[:4])
    with segment_of(opener.folder).open("r+b") as file:
        file.seek(tier.geometry.blocks_offset + tier.geometry.slot_bytes + 7)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    loaded = await bench.tier.read(KEYS[:4], range(4), range(4))
    assert loaded.ok == [True, False, True, True]
    assert is_near(bytes(bench.region.row(2)[:CHUNK]), kv(KEYS[2]))


MODEL = {"model": "m", "dtype": "bfloat16"}
GATE = Gate("int8", "bfloat16", MODEL, {"differing": 0.0}, {"differing": 0.1})


def config(folder: Path, gate: Path | None, **more: Any) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": 16 * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": MODEL,
        "tiers": [{"type": "disk", "path": str(folder), "capacity_bytes": "4MiB"}],
        **({} if gate is None else {"disk_codec": str(gate)}),
        **more,
    }


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "model.gate"
    GATE.write(path)
    return path


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "cannot be read"),
        ("{", "not a file that kvstore gate has written"),
        ('{"format": "other"}', "not of the format"),
        ('{"format": "kvstore gate 1"}', "not a file that kvstore gate has written"),
        (Gate("zip", "bfloat16", MODEL, {}), "codec 'zip' of 'bfloat16' is not known"),
        (Gate("int8", "float32", MODEL, {}), "allowed are int8 of bfloat16, float16"),
        (Gate("int8", "bfloat16", {"model": "n"}, {}), "of a model with model = 'n'"),
        (Gate("int8", "bfloat16", MODEL, {"a": 2.0}, {"a": 1.0}), "does not bear the codec"),
        (Gate("int8", "bfloat16", MODEL, {}, {"a": 1.0}), "a = None, at most 1.0"),
        (Gate("int8", "bfloat16", MODEL, {}, {"a": 1e17}), "a = None, at most 1e"),
        (Gate("int8", "bfloat16", MODEL, {"a": True}, {"a": 1.0}), "a figure is no number"),
        (
            json.dumps(
                {
                    "format": FORMAT,
                    "codec": "int8",
                    "dtype": "bfloat16",
                    "identity": [],
                    "figures": {},
                }
            ),
            "the identity is no table",
        ),
    ],
)
async def test_without_a_gate_of_this_model_nothing_is_encoded(
    tmp_path: Path, written: Gate | str | None, told: str
) -> None:
    path = tmp_path / "gate"
    if isinstance(written, Gate):
        written.write(path)
    elif written is not None:
        path.write_text(written)
    with pytest.raises(ConfigError, match=told) as refused:
        await kvstore.open(config(tmp_path / "cache", path))
    assert "disk_codec = " in str(refused.value)
    assert not (tmp_path / "cache").exists()


async def test_the_name_of_the_codec_is_not_for_others(tmp_path: Path, gate: Path) -> None:
    mine = config(tmp_path / "cache", gate, identity={**MODEL, "codec": "v1"})
    with pytest.raises(ConfigError, match="the name codec is for what kvstore itself says"):
        await kvstore.open(mine)


async def test_a_gate_that_is_replaced_meanwhile_changes_nothing(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = assembly.namespace_of

    def replace(*args: Any) -> Any:
        found = real(*args)
        Gate("int8", "float16", MODEL, {}).write(gate)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "namespace_of", replace)
        await stored(tmp_path / "cache", gate)
    GATE.write(gate)
    assert is_near((await held(tmp_path / "cache", gate))[0], kv(KEYS[0]))


async def test_what_a_tier_holds_is_counted_as_it_is_on_disk(tmp_path: Path, gate: Path) -> None:
    async with kvstore.open(config(tmp_path / "cache", gate)) as store:
        await store.put(KEYS[:8], [kv(key) for key in KEYS[:8]], durable=True)
        tier = store.stats().tiers[0]
    assert tier.used_bytes == tier.written_bytes == 8 * Codec.coded_bytes(CHUNK)


async def test_compaction_copies_as_many_bytes_in_a_second_as_it_may(
    tmp_path: Path, gate: Path
) -> None:
    rates = {}
    for name, its in (("encoded", gate), ("plain", None)):
        told = config(tmp_path / name, its)
        told["tiers"][0]["compaction_rate"] = "1MiB"
        async with kvstore.open(told) as store:
            rates[name] = store._core.owned[0].compactor.rate
    slots = {"encoded": round_to_page(Codec.coded_bytes(CHUNK)), "plain": CHUNK}
    assert rates == {name: 2**20 / size for name, size in slots.items()}


async def stored(folder: Path, gate: Path | None, **more: Any) -> None:
    async with kvstore.open(config(folder, gate, **more)) as store:
        await store.put(KEYS[:8], [kv(key) for key in KEYS[:8]], durable=True)


async def held(folder: Path, gate: Path | None, **more: Any) -> list[bytes]:
    store = await kvstore.open(config(folder, gate, **more))
    async with store, store.get(KEYS[:8]) as chunks:
        return [bytes(each) for each in chunks]


async def test_a_cache_with_a_codec_is_none_of_one_without(tmp_path: Path, gate: Path) -> None:
    cache = tmp_path / "cache"
    await stored(cache, gate)
    assert await held(cache, None) == []
    found = await held(cache, gate)
    assert len(found) == 8
    assert all(is_near(each, kv(key)) for key, each in zip(KEYS, found, strict=False))


@pytest.mark.parametrize("sealed", [False, True])
async def test_every_command_takes_an_encoded_cache(
    tmp_path: Path, gate: Path, sealed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, more = tmp_path / "cache", {}
    if sealed:
        some_keys(tmp_path)
        more["encryption_keys"] = str(tmp_path / "keys.toml")
    await stored(cache, gate, **more)
    keys = more.get("encryption_keys")
    first = await held(cache, gate, **more)
    (namespace,) = survey(cache)
    assert namespace.identity["codec"] == {
        "name": "int8",
        "dtype": "bfloat16",
        "chunk_bytes": CHUNK,
    }
    assert not namespace.faults

    def commands() -> None:
        assert main(["inspect", str(cache)]) == 0
        assert main(["verify", str(cache), *(["--keys", keys] if keys else [])]) == 0
        assert main(["compact", str(cache)]) == 0
        show = ["show", str(cache / namespace.name), KEYS[0].hex(), "--dtype", "bfloat16", "--json"]
        assert main([*show, *(["--keys", keys] if keys else [])]) == 0
        export_bundle(Path(cache / namespace.name), tmp_path / "bundle")
        done = import_bundle(tmp_path / "bundle", tmp_path / "other", keys=keys)
        assert (done.stored, done.faults) == (8, [])

    await asyncio.to_thread(commands)
    told = capsys.readouterr().out
    shown = json.loads(told[told.rindex("\n{\n") :] if "\n{\n" in told else told)
    assert -6 < shown["min"] < -3
    # Copied as they are, not encoded twice.
    assert await held(cache, gate, **more) == first
    assert await held(tmp_path / "other", gate, **more) == first


async def test_the_lane_of_another_process_is_read_decoded(tmp_path: Path, gate: Path) -> None:
    cache = tmp_path / "cache"
    async with kvstore.open(config(cache, gate)) as writer:
        await writer.put(KEYS[:8], [kv(key) for key in KEYS[:8]], durable=True)
        async with kvstore.open(config(cache, gate)) as reader, reader.get(KEYS[:8]) as chunks:
            found = [bytes(each) for each in chunks]
    assert len(found) == 8
    assert all(is_near(each, kv(key)) for key, each in zip(KEYS, found, strict=False))


def shared(folder: Path, gate: Path | None, **more: Any) -> dict[str, Any]:
    """A host without a disk, and a directory that hosts share."""
    told = {} if gate is None else {"store_codec": str(gate)}
    tiers = [{"type": "object", "url": (folder / "share").as_uri()}]
    return config(folder, None, tiers=tiers, **told, **more)


async def put_there(told: dict[str, Any]) -> None:
    async with kvstore.open(told) as store:
        await store.put(KEYS[:8], [kv(key) for key in KEYS[:8]])
        assert await store.flush()
        assert store.stats().tiers[-1].written == 8


async def got_there(told: dict[str, Any]) -> list[bytes]:
    async with kvstore.open(told) as store:
        await store.resolve(KEYS[:8])
        async with store.get(KEYS[:8]) as chunks:
            return [bytes(each) for each in chunks]


def values_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "share").rglob("*") if len(path.name) > 40)


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_store_holds_half_the_bytes(tmp_path: Path, gate: Path, sealed: bool) -> None:
    more = {}
    if sealed:
        some_keys(tmp_path)
        more["encryption_keys"] = str(tmp_path / "keys.toml")
    told = shared(tmp_path, gate, **more)
    await put_there(told)
    sizes = {path.stat().st_size for path in values_in(tmp_path)}
    assert sizes == {Codec.coded_bytes(CHUNK) + RECORD_BYTES}
    found = await got_there(told)
    assert len(found) == 8
    assert all(is_near(each, kv(key)) for key, each in zip(KEYS, found, strict=False))
    assert found != [kv(key) for key in KEYS[:8]]
    assert await got_there(shared(tmp_path, None, **more)) == [], "it is another cache"
    for path in values_in(tmp_path)[:2]:
        raw = bytearray(path.read_bytes())
        raw[RECORD_BYTES + 7] ^= 1
        path.write_bytes(raw)
    assert len(await got_there(told)) < 8


async def test_what_a_disk_has_rounded_is_not_rounded_again_by_a_store(
    tmp_path: Path, gate: Path
) -> None:
    def host(name: str) -> dict[str, Any]:
        told = shared(tmp_path, gate, disk_codec=str(gate))
        disk = {"type": "disk", "path": str(tmp_path / name), "capacity_bytes": "4MiB"}
        return {**told, "tiers": [disk, *told["tiers"]]}

    await put_there(host("one"))
    from_disk = await got_there(host("one"))
    from_store = await got_there(host("other"))
    assert len(from_store) == 8
    assert from_disk == from_store


async def test_a_codec_of_stores_needs_a_store_that_encodes(tmp_path: Path, gate: Path) -> None:
    with pytest.raises(ConfigError, match="store_codec = .*: there is no store"):
        await kvstore.open(config(tmp_path / "cache", None, store_codec=str(gate)))
    mine = shared(tmp_path, gate, identity={**MODEL, "store_codec": "v1"})
    with pytest.raises(ConfigError, match="the name store_codec is for what kvstore itself says"):
        await kvstore.open(mine)
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with pytest.raises(ConfigError, match="it does not encode chunks: leave it out, or store_cod"):
        await kvstore.open({**shared(tmp_path, gate), "tiers": [{"type": "mooncake"}]})


async def test_compaction_copies_the_bytes_that_are_asked_for_however_it_is_asked(
    tmp_path: Path, gate: Path
) -> None:
    whole = config(tmp_path / "cache", gate)
    whole["tiers"][0]["compaction_rate"] = "1MiB"
    async with kvstore.open(whole) as store:
        (tier,) = store._core.owned
        asked = tier.compactor.rate
        store.compact("1MiB")
        assert tier.compactor.rate == asked > 2**20 / CHUNK
