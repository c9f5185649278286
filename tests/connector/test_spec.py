"""A server's configuration becomes a manager and handlers, or a clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connector.handler import TransferResult
from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.connector.server import KVCacheConfig, KVCacheGroup, KVCacheSpec, ServerConfig
from kvstore.connector.spec import KVStoreSpec, OffloadingSpec
from kvstore.errors import ConfigError
from kvstore.testing.manager import keys_from

pytest.importorskip("torch")

import torch
from torch._subclasses import FakeTensorMode

from kvstore.device.layout import pages_of, whole_blocks
from tests.patience import answered

TOKENS, HEADS, SIZE = 16, 2, 8
PAGE = 2 * TOKENS * HEADS * SIZE * 2
"""Bytes that a layer has of a block: keys and values, bfloat16."""


class KeysBeforeValues:
    """An attention backend as servers have them."""

    @staticmethod
    def get_kv_cache_shape(blocks: int, tokens: int, heads: int, size: int) -> tuple[int, ...]:
        return 2, blocks, tokens, heads, size


class Sizes(OffloadingSpec):
    def get_manager(self) -> Any: ...

    def get_handlers(self, kv_caches: Any, attn_backends: Any = None) -> Any: ...


def groups_of(*sizes: int, layers: int = 1, page: int = PAGE) -> KVCacheConfig:
    return KVCacheConfig(
        [
            KVCacheGroup(
                [f"layer-{number}-{index}" for index in range(layers)], KVCacheSpec(size, page)
            )
            for number, size in enumerate(sizes)
        ]
    )


def sizes_of(hash_size: int, *device: int, **extra: Any) -> Sizes:
    return Sizes(ServerConfig.of(hash_size, extra), groups_of(*device))


# -- sizes ---------------------------------------------------------------------------------


def test_without_a_block_size_an_offloaded_block_is_one_of_the_device() -> None:
    spec = sizes_of(16, 16, 32)
    assert spec.hash_block_size == 16
    assert spec.device_block_size == spec.gpu_block_size == spec.offloaded_block_size == (16, 32)
    assert spec.block_size_factor == 1


def test_full_attention_keeps_its_blocks_whatever_window_its_layers_have() -> None:
    class FullAttentionSpec(KVCacheSpec):
        """As of a server that has layers of both kinds in one group."""

    groups = [
        KVCacheGroup([kind.__name__], kind(16, PAGE, sliding_window=16))
        for kind in (FullAttentionSpec, KVCacheSpec)
    ]
    spec = Sizes(ServerConfig.of(16, {}), KVCacheConfig(groups))
    assert spec.sliding_window == (None, 16)


@pytest.mark.parametrize("told", [96, "96"])
def test_a_block_size_is_several_blocks_of_the_device(told: object) -> None:
    spec = sizes_of(16, 32, 32, block_size=told)
    assert spec.block_size_factor == 3
    assert spec.offloaded_block_size == (96, 96)


@pytest.mark.parametrize(
    ("hash_size", "device", "extra", "message"),
    [
        (16, (24,), {}, "group 0 has device blocks of 24 tokens: must be a multiple of .*16"),
        (16, (16, 8), {}, "group 1 has device blocks of 8 tokens"),
        (16, (), {}, "no KV cache group"),
        (0, (16,), {}, "hash block size = 0: must be a whole number"),
        (16, (-16,), {}, "device block size = -16"),
        (16, (32,), {"block_size": 48}, "block_size = 48: must be a multiple of .*32"),
        (16, (32,), {"block_size": 0}, "block_size = 0: must be a whole number"),
        (16, (32,), {"block_size": "big"}, "block_size = 'big': must be a whole number"),
        (16, (32,), {"block_size": True}, "block_size = True"),
        (16, (16, 32), {"block_size": 64}, "one size; here they have 16, 32 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    hash_size: int, device: tuple[int, ...], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes_of(hash_size, *device, **extra)


# -- kvstore behind a server ---------------------------------------------------------------


def extra_config(folder: Path | None = None, **more: Any) -> dict[str, Any]:
    tier = {
        "type": "disk",
        "path": str(folder),
        "capacity_bytes": "8MiB",
        "segment_bytes": "1MiB",
    }
    return {
        "cpu_bytes_to_use": "256KiB",
        "identity": {"model": "m"},
        "tiers": [tier] if folder is not None else [],
        **more,
    }


class Worker:
    """A server's KV cache of three layers, and its handlers."""

    def __init__(self, spec: KVStoreSpec, blocks: int = 32) -> None:
        self.layers = {
            name: torch.zeros(2, blocks, TOKENS, HEADS, SIZE, dtype=torch.bfloat16)
            for group in spec.kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        backends = dict.fromkeys(self.layers, KeysBeforeValues)
        self.ways = {
            (source, target): handler
            for source, target, handler in spec.get_handlers(self.layers, backends)
        }

    def compute(self, key: bytes, blocks: list[int]) -> None:
        for layer, tensor in enumerate(self.layers.values()):
            for place, block in enumerate(blocks):
                seed = int.from_bytes(key[:4], "big") + 100 * layer + place
                generator = torch.Generator().manual_seed(seed)
                tensor[:, block] = torch.rand(
                    2, TOKENS, HEADS, SIZE, generator=generator, dtype=torch.float32
                ).to(torch.bfloat16)

    def content(self, blocks: list[int]) -> list[bytes]:
        return [
            bytes(tensor[:, block].contiguous().view(torch.uint8).numpy().tobytes())
            for tensor in self.layers.values()
            for block in blocks
        ]

    def copy(self, job: int, source: Any, target: Any) -> TransferResult:
        handler = self.ways[type(source), type(target)]
        assert handler.transfer_async(job, (source, target))
        handler.wait([job])
        (done,) = handler.get_finished()
        assert done.success
        return done

    def shutdown(self) -> None:
        for handler in self.ways.values():
            handler.shutdown()


def spec_of(folder: Path | None = None, **more: Any) -> KVStoreSpec:
    config = ServerConfig.of(TOKENS, extra_config(folder, **more))
    return KVStoreSpec(config, groups_of(TOKENS, layers=3))


@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_come_back_from_host_memory_and_from_disk_after_a_restart(
    tmp_path: Path, factor: int
) -> None:
    keys = keys_from(0, 6)
    spec = spec_of(tmp_path, block_size=factor * TOKENS)
    assert spec.chunk_bytes == 3 * PAGE * factor
    manager, worker = spec.get_manager(), Worker(spec)
    assert spec.get_manager() is manager
    blocks = list(range(6 * factor))
    for number, key in enumerate(keys):
        worker.compute(key, blocks[number * factor : (number + 1) * factor])
    before = worker.content(blocks)
    out = manager.prepare_store(keys)
    assert out is not None
    done = worker.copy(1, DeviceLoadStoreSpec(blocks), out.store_spec)
    assert done.transfer_size == 6 * spec.chunk_bytes
    manager.complete_store(keys)
    targets = [block + 12 for block in blocks]
    assert manager.lookup(keys) == 6
    worker.copy(2, manager.prepare_load(keys), DeviceLoadStoreSpec(targets))
    manager.complete_load(keys)
    assert worker.content(targets) == before
    manager.shutdown()
    worker.shutdown()

    spec = spec_of(tmp_path, block_size=factor * TOKENS)
    manager, worker = spec.get_manager(), Worker(spec)
    assert answered(lambda: manager.lookup(keys)) == 6
    worker.copy(3, manager.prepare_load(keys), DeviceLoadStoreSpec(targets))
    assert worker.content(targets) == before
    worker.shutdown()
    manager.shutdown()


def test_other_layouts_do_not_share_chunks(tmp_path: Path) -> None:
    keys = keys_from(0, 4)
    manager = spec_of(tmp_path).get_manager()
    out = manager.prepare_store(keys)
    assert out is not None
    manager.complete_store(keys)
    manager.shutdown()
    other = KVStoreSpec(
        ServerConfig.of(TOKENS, extra_config(tmp_path)),
        KVCacheConfig([KVCacheGroup(["a", "b", "c"], KVCacheSpec(TOKENS, PAGE))]),
    )
    assert other.get_manager().lookup(keys) == 0
    other.get_manager().shutdown()


def test_a_job_that_makes_no_sense_has_no_success_and_harms_nobody(tmp_path: Path) -> None:
    spec = spec_of()
    manager, worker = spec.get_manager(), Worker(spec)
    handler = worker.ways[DeviceLoadStoreSpec, HostLoadStoreSpec]
    assert not handler.transfer_async(1, (HostLoadStoreSpec([1]), HostLoadStoreSpec([2])))
    assert handler.transfer_async(2, (DeviceLoadStoreSpec([99]), HostLoadStoreSpec([2])))
    assert handler.transfer_async(3, (DeviceLoadStoreSpec([1, 2]), HostLoadStoreSpec([2])))
    assert handler.transfer_async(4, (DeviceLoadStoreSpec([-1]), HostLoadStoreSpec([2])))
    assert [(done.job_id, done.success) for done in handler.get_finished()] == [
        (2, False),
        (3, False),
        (4, False),
    ]
    worker.shutdown()
    assert not handler.transfer_async(5, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([2])))
    manager.shutdown()


def test_the_last_to_end_gives_host_memory_back() -> None:
    spec = spec_of()
    manager, worker = spec.get_manager(), Worker(spec)
    region = manager.region
    manager.shutdown()
    assert region.view.nbytes > 0
    worker.shutdown()
    with pytest.raises(AssertionError):
        _ = region.view


def test_a_second_server_of_one_name_in_one_process_is_refused() -> None:
    """Each would decide alone what the same rows hold."""

    def named(rows: int) -> KVStoreSpec:
        extra = {"cpu_bytes_to_use": rows * 4 * PAGE, "identity": {}}
        return KVStoreSpec(ServerConfig.of(TOKENS, extra, engine_id="0"), groups_of(TOKENS))

    first = named(8).get_manager()
    for rows in (8, 16):
        with pytest.raises(ConfigError, match="engine_id = '0': another server in this process"):
            named(rows).get_manager()
    assert first.region.view.nbytes > 0
    first.shutdown()
    again = named(16).get_manager()
    again.shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"chunk_bytes": 4096}, "chunk_bytes must not be set"),
        ({"cpu_bytes": 1}, "unknown key cpu_bytes"),
        ({"identity": None}, "missing key identity"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use"),
    ],
)
def test_what_cannot_be_configured_is_refused_by_name(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, **extra)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    spec = spec_of()
    layers = {f"layer-0-{n}": torch.zeros(4, 2, 16, 2, 8, dtype=torch.bfloat16) for n in range(3)}
    with pytest.raises(ConfigError, match="layer layer-0-2 has no KV tensor"):
        spec.get_handlers({name: layers[name] for name in list(layers)[:2]})
    larger = {**layers, "layer-0-1": torch.zeros(4, 3, 16, 2, 8, dtype=torch.bfloat16)}
    with pytest.raises(ConfigError, match="layer-0-1: .* 4 blocks of 1536 bytes, but .* 1024"):
        spec.get_handlers(larger)
    elsewhere = {**layers, "layer-0-0": layers["layer-0-0"].to("meta")}
    with pytest.raises(ConfigError, match="on cpu, meta: must be in host memory or on CUDA"):
        spec.get_handlers(elsewhere)

    fewer = {**layers, "layer-0-2": layers["layer-0-2"][:3]}
    with pytest.raises(ConfigError, match="layer layer-0-2 has 3 blocks, others .* have 4"):
        spec.get_handlers(fewer)

    class Odd:
        @staticmethod
        def get_kv_cache_shape(*_: int) -> tuple[int, ...]:
            return 2, 7

    with pytest.raises(ConfigError, match="no dimension counts them"):
        spec.get_handlers(layers, {"layer-0-1": Odd})


def test_groups_that_do_not_fit_are_refused_by_name() -> None:
    config = ServerConfig.of(16, {"cpu_bytes_to_use": 4096})
    groups = groups_of(16, 16, page=4096)
    with pytest.raises(ConfigError, match="one chunk of each of the 2 KV cache groups, 8192 bytes"):
        KVStoreSpec(config, groups).get_manager()
    first, second = groups.kv_cache_groups
    for layers, message in (
        (first.layer_names, "is named twice"),
        ("layer", "layer_names = 'layer': must be a list"),
    ):
        twice = KVCacheConfig([first, KVCacheGroup(layers, second.kv_cache_spec)])
        with pytest.raises(ConfigError, match=message):
            KVStoreSpec(config, twice)
    with pytest.raises(ConfigError, match=r"page_size_bytes = 10\.7"):
        KVStoreSpec(config, KVCacheConfig([KVCacheGroup(["a"], KVCacheSpec(16, 10.7))]))  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "keys before values"])
@pytest.mark.parametrize("known", [False, True], ids=["", "number of blocks known"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_blocks_that_kernels_cut_into_smaller_ones_are_copied_whole(
    times: int, known: bool, apart: bool
) -> None:
    """A block that is given out has `times` blocks of the kernels, one after the other."""
    blocks = 8
    page = times * PAGE
    config = KVCacheConfig(
        groups_of(times * TOKENS, page=page).kv_cache_groups, blocks if known else None
    )
    spec = KVStoreSpec(ServerConfig.of(times * TOKENS, extra_config()), config)
    shape = (2, times * blocks) if apart else (times * blocks, 2)
    tensor = torch.zeros(*shape, TOKENS, HEADS, SIZE, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    before = torch.rand(tensor.shape, generator=generator).to(torch.bfloat16)
    tensor.copy_(before)
    backends = {"layer-0-0": KeysBeforeValues} if apart else {}
    (_, _, handler), _ = spec.get_handlers({"layer-0-0": tensor}, backends)
    stored, loaded = [5, 2, 7], [1, 6, 0]
    rows = HostLoadStoreSpec([0, 1, 2])
    for number, job in enumerate(
        [(DeviceLoadStoreSpec(stored), rows), (rows, DeviceLoadStoreSpec(loaded))]
    ):
        assert handler.transfer_async(number, job)
        handler.wait([number])
        (done,) = handler.get_finished()
        assert (done.success, done.transfer_size) == (True, 3 * page)
    expected = before.clone()
    at = 1 if apart else 0
    for source, target in zip(stored, loaded, strict=True):
        for part in range(times):
            its = before.select(at, source * times + part)
            expected.select(at, target * times + part).copy_(its)
    assert torch.equal(tensor, expected)
    handler.shutdown()


@settings(deadline=None)
@given(st.data())
def test_tables_of_whole_blocks_name_each_byte_of_a_block_once_or_are_refused(
    data: st.DataObject,
) -> None:
    kernel_blocks, times = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    apart, size = data.draw(st.booleans()), data.draw(st.integers(1, 5))
    shape = (2, kernel_blocks, size) if apart else (kernel_blocks, 2, size)
    tensor = torch.arange(2 * kernel_blocks * size, dtype=torch.uint8).reshape(shape)
    tables = pages_of(tensor, 1 if apart else 0)
    known = data.draw(st.sampled_from([None, kernel_blocks // times, kernel_blocks]))
    try:
        whole = whole_blocks(tables, times * 2 * size, known)
    except ConfigError:
        assert kernel_blocks % times or known == kernel_blocks or (known == 0)
        return
    if known == kernel_blocks and times > 1:
        assert whole == tables, "a padded tensor"
        return
    moved = [
        bytes(table.flat[table.offset + block * table.stride :][: table.size].numpy())
        for block in range(kernel_blocks // times)
        for table in whole
    ]
    for block in range(kernel_blocks // times):
        its = tensor.narrow(1 if apart else 0, block * times, times)
        count = len(whole)
        assert sorted(b"".join(moved[block * count :][:count])) == sorted(its.flatten().tolist())
    assert sum(map(len, moved)) == kernel_blocks * 2 * size


class Copies:
    """Stands for copies on a CUDA device."""

    ended = 0

    def __init__(self, groups: Any, rows: Any, per_chunk: int) -> None:
        assert rows.shape[1] == per_chunk * sum(pages.size for pages in groups[0])

    def shutdown(self) -> None:
        Copies.ended += 1


def test_layers_on_a_device_have_a_handler_for_each_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.device.CudaCopies", Copies)
    monkeypatch.setattr(Copies, "ended", 0)
    with FakeTensorMode():
        layers = {
            f"layer-0-{n}": torch.zeros(4, 2, 16, 2, 8, dtype=torch.bfloat16, device="cuda")
            for n in range(3)
        }
    handlers = [handler for _, _, handler in spec_of().get_handlers(layers)]
    assert len(set(handlers)) == 2
    for handler in handlers:
        handler.shutdown()
    assert Copies.ended == 2
