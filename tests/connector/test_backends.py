"""Backends hand out each block once, and refuse what they cannot do by name."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest

from kvstore.connector.backend import Backend, MappedFileBackend, PinnedBackend
from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.errors import ConfigError, PathUnusableError


@pytest.fixture(params=["pinned", "mapped file"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "pinned":
        return PinnedBackend(32, 8, 5000)
    return MappedFileBackend(32, 8, 5000, tmp_path / "blocks")


KEYS = [b"%d" % n for n in range(8)]


def test_blocks_are_given_out_once_and_come_back(backend: Backend) -> None:
    assert backend.block_size == 32
    blocks = backend.allocate_blocks(KEYS[:5])
    assert backend.get_num_free_blocks() == 3
    more = backend.allocate_blocks(KEYS[5:])
    spec = backend.get_load_store_spec(KEYS, [*blocks, *more])
    assert isinstance(spec, HostLoadStoreSpec)
    assert spec.block_ids.tolist() == list(range(8))
    for block in blocks:
        backend.free(block)
    assert backend.get_num_free_blocks() == 5
    assert not any(block.is_ready for block in more)
    backend.close()
    backend.close()


def test_more_than_is_free_is_refused_and_nothing_is_given_out(backend: Backend) -> None:
    backend.allocate_blocks(KEYS[:4])
    with pytest.raises(ValueError, match="5 blocks were requested, 4 are free"):
        backend.allocate_blocks(KEYS[:5])
    assert backend.get_num_free_blocks() == 4
    backend.close()


def test_a_block_is_ready_from_its_store_on(backend: Backend) -> None:
    (block,) = backend.allocate_blocks(KEYS[:1])
    assert block.ref_cnt == -1
    block.ref_cnt = 0
    assert block.is_ready
    backend.close()


def test_rows_are_memory(backend: Backend) -> None:
    assert isinstance(backend, (PinnedBackend, MappedFileBackend))
    assert backend.array.shape == (8, 8192)
    backend.array[3] = 7
    assert (backend.array[3] == 7).all()
    assert (backend.array[2] == 0).all()
    backend.close()


def test_the_file_of_a_mapped_backend_is_whole_private_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    backend = MappedFileBackend(16, 4, 4096, path)
    told = path.stat()
    assert stat.S_IMODE(told.st_mode) == 0o600
    assert told.st_blocks * 512 >= told.st_size == 4 * 4096
    backend.array[1] = 9
    assert path.read_bytes()[4096:8192] == bytes([9]) * 4096
    backend.close()
    backend.close()
    assert not path.exists()


@pytest.mark.parametrize("there", ["file", "link", "no folder"])
def test_a_path_that_cannot_be_used_is_refused_by_name_and_left_alone(
    tmp_path: Path, there: str
) -> None:
    path = tmp_path / "blocks"
    if there == "file":
        path.write_text("somebody's")
    elif there == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path = tmp_path / "none" / "blocks"
    with pytest.raises(PathUnusableError, match=str(path)):
        MappedFileBackend(16, 4, 4096, path)
    with pytest.raises(PathUnusableError, match="null (byte|character)"):
        MappedFileBackend(16, 4, 4096, f"{path}\0")
    if there == "file":
        assert path.read_text() == "somebody's"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("room", [None, 2**72])
def test_a_file_larger_than_the_disk_is_refused_and_takes_nothing_from_others(
    tmp_path: Path, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    disk = os.statvfs(tmp_path)
    blocks = (room or disk.f_blocks * disk.f_frsize) // 4096 + 1000
    with pytest.raises(PathUnusableError, match="blocks"):
        MappedFileBackend(16, blocks, 4096, tmp_path / "blocks")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("blocks", "size"), [(0, 4096), (4, 0), (-1, 4096)])
def test_sizes_below_one_are_refused(tmp_path: Path, blocks: int, size: int) -> None:
    with pytest.raises(ConfigError):
        MappedFileBackend(16, blocks, size, tmp_path / "blocks")
    with pytest.raises(ConfigError):
        PinnedBackend(16, blocks, size)
    assert list(tmp_path.iterdir()) == []


# -- where blocks lie ----------------------------------------------------------------------


def test_specs_travel_to_other_processes() -> None:
    spec = pickle.loads(pickle.dumps(DeviceLoadStoreSpec([5, 6, 9], [2, 1], [3, 0])))
    assert isinstance(spec, DeviceLoadStoreSpec)
    assert spec.block_ids.tolist() == [5, 6, 9]
    assert (spec.group_sizes, spec.block_indices) == ([2, 1], [3, 0])
    assert spec.medium() == "device"
    assert pickle.loads(pickle.dumps(HostLoadStoreSpec([1]))).block_ids.dtype == np.int32


def test_groups_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="must add up to the 3 blocks"):
        DeviceLoadStoreSpec([1, 2, 3], [1, 1])
    with pytest.raises(ValueError, match="one block for each of the 2 groups"):
        DeviceLoadStoreSpec([1, 2, 3], [1, 2], [0])


def test_a_copy_that_finds_no_memory_is_reported_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from kvstore.connector.handler import HostHandler
    from kvstore.device import HostCopies
    from kvstore.device.layout import pages_of

    rows = np.zeros((4, 4096), np.uint8)
    copies = HostCopies([pages_of(torch.zeros(4, 4096, dtype=torch.uint8))], rows, 1)

    def no_memory(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(copies, "store", no_memory)
    handler = HostHandler(copies)
    assert handler.transfer_async(1, (DeviceLoadStoreSpec([0]), HostLoadStoreSpec([0])))
    (ended,) = handler.get_finished()
    assert (ended.job_id, ended.success) == (1, False)
