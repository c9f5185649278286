"""The fingerprint of weight files: the same for the same content, another for another."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.vllm.identity import fingerprint as module
from kvstore.vllm.identity.fingerprint import (
    UnreadableError,
    adapter_files,
    fingerprint,
    model_files,
)

LARGE = module.WHOLE_BYTES + 2**20


def safetensors(path: Path, tensors: dict[str, int], fill: int = 0) -> dict[str, tuple[int, int]]:
    """A sparse safetensors file; where each tensor lies in it."""
    header: dict[str, dict[str, Any]] = {}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    told = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(told)) + told + bytes([fill]))
        handle.truncate(8 + len(told) + at)
    start = 8 + len(told)
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def write(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as handle:
        handle.seek(offset)
        handle.write(content)


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    path = tmp_path / "model.safetensors"
    return path, safetensors(path, {"norm": 8192, "matrix": LARGE, "bias": 4096, "head": LARGE})


def digest(*paths: Path) -> str:
    return fingerprint(paths).digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.data())
def test_every_byte_of_a_small_file_counts(
    tmp_path: Path, content: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    before = digest(path)
    at = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert digest(path) != before


@pytest.mark.parametrize("tensor", ["norm", "bias"])
def test_every_byte_of_a_small_tensor_in_a_large_file_counts(
    large: tuple[Path, dict[str, tuple[int, int]]], tensor: str
) -> None:
    path, places = large
    before = digest(path)
    begin, end = places[tensor]
    for at in (begin, (begin + end) // 2, end - 1):
        write(path, at, b"\1")
        assert digest(path) != before
        write(path, at, b"\0")
    assert digest(path) == before


@pytest.mark.parametrize("tensor", ["matrix", "head"])
def test_another_tensor_of_the_same_shape_is_noticed(
    large: tuple[Path, dict[str, tuple[int, int]]], tensor: str
) -> None:
    path, places = large
    before = digest(path)
    begin, end = places[tensor]
    write(path, begin, b"\1" * (end - begin))
    assert digest(path) != before


def test_a_large_file_that_is_not_safetensors_is_read_at_its_ends_and_in_between(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    os.truncate(path, 2 * LARGE)
    seen = {digest(path)}
    for at, length in ((0, 1), (2 * LARGE - 1, 1), (LARGE // 2, LARGE // 2)):
        write(path, at, b"\1" * length)
        seen.add(digest(path))
    assert len(seen) == 4


@pytest.mark.parametrize("header", [b"\xff" * 16, struct.pack("<Q", 4) + b"nope", b""])
def test_a_broken_header_of_a_large_file_is_no_fault(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, LARGE)
    assert digest(path)


def test_names_and_the_number_of_files_count_and_their_order_does_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    seen = {digest(one, two), digest(one), digest(two)}
    assert digest(two, one) in seen
    one.rename(tmp_path / "other.bin")
    seen.add(digest(tmp_path / "other.bin", two))
    assert len(seen) == 4


def test_a_copied_or_touched_file_has_the_same_fingerprint(
    large: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    path, _ = large
    before = digest(path)
    os.utime(path, (1, 1))
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    shutil.copyfile(path, copy)
    link = tmp_path / "link" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    assert digest(path) == digest(copy) == digest(link) == before


def test_nothing_is_read_again_until_somebody_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(b"a" * 100)
    first = fingerprint([path])
    read: list[Path] = []
    content = module._content

    def reading(path: Path) -> bytes:
        read.append(path)
        return content(path)

    monkeypatch.setattr(module, "_content", reading)
    assert fingerprint([path], first) is first
    assert read == []
    found = path.stat()
    while path.stat().st_ctime_ns == found.st_ctime_ns:
        path.write_bytes(b"b" * 100)
        # As a copy that keeps times does it; the inode's own time cannot be set.
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert fingerprint([path], first).digest != first.digest
    assert read == [path]


def test_files_that_change_while_they_are_read_have_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"a")

    def changing(path: Path) -> bytes:
        path.write_bytes(b"bb")
        return b""

    monkeypatch.setattr(module, "_content", changing)
    with pytest.raises(UnreadableError, match="change"):
        fingerprint([path])


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        fingerprint([])
    with pytest.raises(UnreadableError, match="missing"):
        fingerprint([tmp_path / "missing.bin"])
    with pytest.raises(UnreadableError, match="regular"):
        fingerprint([tmp_path])
    with pytest.raises(UnreadableError, match="no weight files"):
        adapter_files(str(tmp_path))


def test_a_large_model_costs_a_few_thousand_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """140 GB in 30 files: what counts is how often the medium is asked, and for how much."""
    files = []
    for number in range(30):
        path = tmp_path / f"model-{number:05}-of-00030.safetensors"
        safetensors(path, {f"layer-{index}": 160 * 2**20 for index in range(29)}, number)
        files.append(path)
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    found = fingerprint(files)
    assert found.total_bytes > 139 * 10**9
    assert len(reads) < 10_000
    assert sum(reads) < 64 * 2**20


class Model:
    """As much of vLLM's `ModelConfig` as is looked at."""

    def __init__(
        self, model: str, model_weights: str = "", revision: str | None = None, **config: str
    ) -> None:
        self.model, self.model_weights, self.revision = model, model_weights, revision
        self.hf_config = SimpleNamespace(**config)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_of_several_kinds_of_files_those_count_that_vllm_loads(tmp_path: Path) -> None:
    for name in (
        "model-1.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
        "weights.pt",
        "README.md",
        "tokenizer.json",
        "config.json",
        "modeling_own.py",
        "hf_quant_config.json",
        "preprocessor_config.json",
    ):
        (tmp_path / name).write_bytes(b"x")
    beside = ["hf_quant_config.json", "modeling_own.py", "preprocessor_config.json"]

    def found(load_format: str) -> list[str]:
        return names(model_files(Model(str(tmp_path)), load_format, None))

    assert found("auto") == ["consolidated.safetensors", "model-1.safetensors", *beside]
    assert found("mistral") == ["consolidated.safetensors", *beside]
    assert found("pt") == ["weights.pt", *beside]
    assert found("npcache") == ["pytorch_model.bin", *beside]
    one = tmp_path / "model-1.safetensors"
    assert model_files(Model(str(one)), "auto", None) == [one]


def test_parts_of_a_model_that_lie_elsewhere_count(tmp_path: Path) -> None:
    """As vLLM loads Kimi-Audio's tower from a folder below, and Ultravox's text model."""
    main, tower, text = tmp_path / "main", tmp_path / "main" / "tower", tmp_path / "text"
    for folder in (tower, text, main / "original", main / "checkpoint-500"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(folder.name.encode())
    (main / "model.safetensors").write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(text)
    model = Model(str(main), audio_model_id="", text_model_id=str(link))

    def found() -> str:
        return digest(*model_files(model, "auto", None, several=True))

    before = found()
    for folder in (main / "original", main / "checkpoint-500"):
        (folder / "model.safetensors").write_bytes(b"not loaded")
    assert found() == before
    (tower / "model.safetensors").write_bytes(b"TOWER")
    with_tower = found()
    (text / "model.safetensors").write_bytes(b"TEXT")
    assert len({before, with_tower, found()}) == 3
    assert names(model_files(model, "auto", None)) == ["model.safetensors"]
    model.hf_config.text_model_id = "org/never-fetched"
    with pytest.raises(UnreadableError, match="org/never-fetched"):
        found()


def test_a_model_of_a_hub_is_read_in_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    for commit, content in (("a" * 40, b"1"), ("b" * 40, b"2")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(content)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "v2").write_text("b" * 40)

    def found(revision: str | None) -> bytes:
        (path,) = model_files(Model("org/name", revision=revision), "auto", str(tmp_path))
        return path.read_bytes()

    assert found(None) == found("main") == found("a" * 40) == b"1"
    assert found("v2") == found("b" * 40) == b"2"


@pytest.mark.parametrize(
    "find", [adapter_files, lambda name: model_files(Model(name), "auto", None)]
)
def test_what_another_hub_holds_is_not_looked_for_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[..., object]
) -> None:
    """With ModelScope, vLLM loads from its cache; that of Hugging Face may hold an older one."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "model.safetensors"):
        (snapshot / name).write_bytes(b"x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find("org/name")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(UnreadableError, match="ModelScope"):
        find("org/name")
    assert find(str(snapshot))


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/never-fetched", "/no/such/folder"])
def test_weights_that_are_elsewhere_are_not_guessed(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableError):
        model_files(Model(name), "auto", str(tmp_path))
    with pytest.raises(UnreadableError):
        model_files(Model(str(tmp_path), model_weights=name), "auto", str(tmp_path))


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "a-plugin"])
def test_a_loader_that_may_read_elsewhere_is_not_guessed(tmp_path: Path, load_format: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UnreadableError, match=load_format):
        model_files(Model(str(tmp_path)), load_format, None)


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"x")
    assert names(adapter_files(str(tmp_path))) == [
        "adapter_model.safetensors",
        "adapter_config.json",
    ]


def test_fingerprints_may_be_taken_side_by_side(
    large: tuple[Path, dict[str, tuple[int, int]]],
) -> None:
    path, _ = large
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: digest(path), range(8)))) == 1
