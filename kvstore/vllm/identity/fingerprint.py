"""Fingerprints of weight files: cheap, and different when the content differs.

The name, the size and some bytes of each file count; never its times, owner or place.
A file of up to `WHOLE_BYTES` is read whole. Of a larger file these parts are read:

- its first and last pages, and `PAGES` pages evenly spaced;
- of a safetensors file the whole header, every tensor of up to `SMALL_TENSOR` bytes, and one page
  from the middle of each larger one.

So a change is noticed unless it keeps names, sizes and headers and touches nothing but a few
values inside large tensors, between the pages that are read. No training step is like that; an
edit of single values by hand may be.

`model_files` and `adapter_files` find the files that hold weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from kvstore.errors import MALFORMED
from kvstore.tiers.disk.io.base import read_bytes

__all__ = [
    "AbsentError",
    "Fingerprint",
    "UnreadableError",
    "adapter_files",
    "fingerprint",
    "model_files",
]

WHOLE_BYTES = 32 * 2**20
BLOCK = 4 * 2**20
PAGE = 4096
EDGE = 64 * 1024
PAGES = 256
SMALL_TENSOR = 16 * 1024
MAX_HEADER = 100 * 2**20
"""safetensors allows no larger header."""

THREADS = 8
"""Files are read side by side: on network file systems each page is a round trip."""


class UnreadableError(Exception):
    """There are no files, or they cannot be read."""


class AbsentError(UnreadableError):
    """There are no files on this machine, or not yet."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of the content of some files.

    Attributes:
        digest: the same for the same names and content, wherever the files lie.
        signature: names, inodes, sizes and times; if it is the same, no file was written.
        total_bytes: of all files together.
    """

    digest: str
    signature: tuple[tuple[str, int, int, int, int, int], ...]
    total_bytes: int


def fingerprint(files: Sequence[Path], known: Fingerprint | None = None) -> Fingerprint:
    """The fingerprint of `files`; of those with one name the order counts.

    Args:
        files: symbolic links are followed.
        known: an earlier one; with an equal signature nothing is read.

    Raises:
        UnreadableError: if there are none, or one cannot be read.
    """
    if not files:
        raise AbsentError("no weight files")
    ordered = sorted(files, key=lambda path: path.name)
    try:
        signature = tuple(_signed(path) for path in ordered)
        if known is not None and known.signature == signature:
            return known
        with ThreadPoolExecutor(min(THREADS, len(ordered)), "kvstore-fingerprint") as pool:
            contents = list(pool.map(_content, ordered))
        if signature != tuple(_signed(path) for path in ordered):
            raise UnreadableError("the files change while they are read")
    except OSError as error:
        raise UnreadableError(f"{error.filename or ordered[0]}: {error.strerror}") from error
    whole = xxh3_128()
    for (name, *_), content in zip(signature, contents, strict=True):
        whole.update(f"{len(name)}:{name}".encode() + content)
    return Fingerprint(whole.hexdigest(), signature, sum(entry[3] for entry in signature))


def _signed(path: Path) -> tuple[str, int, int, int, int, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableError(f"{path}: not a regular file")
    return (
        path.name,
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        digest = xxh3_128(struct.pack("<Q", size))
        if size > WHOLE_BYTES:
            # Single pages here and there: reading ahead would multiply the bytes.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            places: Iterator[tuple[int, int]] = _places(fd, size, path.suffix == ".safetensors")
        else:
            places = ((at, min(BLOCK, size - at)) for at in range(0, size, BLOCK))
        for offset, length in places:
            digest.update(read_bytes(fd, length, offset))
        return digest.digest()
    finally:
        os.close(fd)


def _places(fd: int, size: int, safetensors: bool) -> Iterator[tuple[int, int]]:
    yield 0, EDGE
    yield size - EDGE, EDGE
    for number in range(PAGES):
        yield size * number // PAGES // PAGE * PAGE, PAGE
    if safetensors:
        yield from _tensor_places(fd, size)


def _tensor_places(fd: int, size: int) -> Iterator[tuple[int, int]]:
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length > min(MAX_HEADER, size - 8):
        return
    yield 8, length
    try:
        header = json.loads(read_bytes(fd, length, 8))
        spans = sorted(
            (int(tensor["data_offsets"][0]), int(tensor["data_offsets"][1]))
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    except MALFORMED:
        # Not safetensors after all: the pages above have to do.
        return
    start = 8 + length
    for begin, end in spans:
        if not 0 <= begin <= end <= size - start:
            return
        if end - begin <= SMALL_TENSOR:
            yield start + begin, end - begin
        else:
            yield start + (begin + end) // 2, PAGE


KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Where a folder holds several kinds, vLLM takes the first of these."""

PREFERRED = {"pt": ".pt", "npcache": ".bin", "gguf": ".gguf"}
"""The kind that a load format asks for."""

TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Left by trainers beside the weights, never loaded."""

FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read the files of the model itself."""


ADAPTER_CONFIG = "adapter_config.json"
"""Beside the weights of an adapter."""

PARTS = ("audio_model_id", "text_model_id")
"""Of the model's own configuration: where vLLM takes parts of its weights from."""

NOT_LOADED = re.compile(r"original|onnx|openvino|coreml|checkpoint-\d+|global_step\d+|\..*")
"""Folders beside the weights that hold them in other forms, or as they were."""


def model_files(
    model: Any, load_format: str, download_dir: str | None, *, several: bool = False
) -> list[Path]:
    """The weight files of a vLLM `ModelConfig`, and code and quantisation tables beside them.

    Args:
        several: whether it may have parts, whose weights lie in folders below or in `PARTS`.

    Raises:
        UnreadableError: if they do not lie on this machine.
    """
    if load_format not in FORMATS:
        raise UnreadableError(f"load_format {load_format} may take them from elsewhere")
    name = str(getattr(model, "model_weights", "") or model.model)
    place = _local(name, getattr(model, "revision", None), download_dir)
    if place.is_file():
        return [place]
    files = _entries(place)
    if load_format == "mistral":
        weights = [path for path in files if path.name.startswith("consolidated")]
        return _of_kind(weights, place, load_format) + _beside(files)
    found = _of_kind(files, place, load_format) + _beside(files)
    return found + _of_parts(model, place, download_dir) if several else found


def _of_parts(model: Any, place: Path, download_dir: str | None) -> list[Path]:
    found: list[Path] = []
    for folder in _entries(place, Path.is_dir):
        if not NOT_LOADED.fullmatch(folder.name) and not folder.is_symlink():
            # vLLM loads nothing from one that cannot be read.
            with contextlib.suppress(UnreadableError):
                files = _entries(folder)
                if all(path.name != ADAPTER_CONFIG for path in files):
                    found += _weights_of(files)
    for key in PARTS:
        if name := getattr(model.hf_config, key, None):
            # vLLM takes no revision for these.
            part = _local(str(name), None, download_dir)
            found += [part] if part.is_file() else _weights_of(_entries(part))
    return found


def _weights_of(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix in KINDS and path.name not in TRAINING]


def adapter_files(path: str) -> list[Path]:
    """The files of the LoRA adapter that vLLM calls `path`.

    Raises:
        AbsentError: if they do not lie on this machine.
        UnreadableError: if their folder cannot be read.
    """
    place = _local(os.path.expanduser(path), None, None)
    files = _entries(place)
    weights = _weights_of(files)
    if not weights:
        raise AbsentError(f"{place}: no weight files")
    return weights + [found for found in files if found.name == ADAPTER_CONFIG]


def _local(name: str, revision: str | None, download_dir: str | None) -> Path:
    if "://" in name:
        raise AbsentError(f"{name}: not on this machine")
    if os.path.exists(name):
        return Path(name)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        # What the cache of the Hugging Face hub has under that name is not what vLLM loads.
        raise AbsentError(f"{name}: in ModelScope's cache")
    snapshot = _hub_snapshot(name, revision, download_dir)
    if snapshot is None:
        raise AbsentError(f"{name}: neither a folder nor in the model hub's cache")
    return snapshot


def _hub_snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder of a model in the cache of the Hugging Face hub; nothing is downloaded."""
    # "org/name", and ":Q4_K" of one that holds several.
    repository = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?::[\w.-]+)?", name)
    if repository is None:
        return None
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    folder = Path(download_dir or HF_HUB_CACHE) / f"models--{repository[1].replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError):
        # Otherwise the revision is a commit itself, or has never been fetched.
        commit = (folder / "refs" / commit).read_text().strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _entries(folder: Path, kind: Callable[[Path], bool] = Path.is_file) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if kind(path))
    except OSError as error:
        raise UnreadableError(f"{folder}: {error.strerror}") from error


def _of_kind(files: list[Path], folder: Path, load_format: str) -> list[Path]:
    for kind in (PREFERRED.get(load_format), *KINDS):
        found = [path for path in _weights_of(files) if path.suffix == kind]
        if found:
            return found
    raise UnreadableError(f"{folder}: no weight files of a kind that is known")


def _beside(files: list[Path]) -> list[Path]:
    return [
        path
        for path in files
        if path.suffix == ".py"
        or (path.suffix == ".json" and "quant" in path.name)
        # They say how images become numbers.
        or path.name.endswith("processor_config.json")
    ]
