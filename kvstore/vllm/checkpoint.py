"""Which files hold a model's weights, and where they lie."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from kvstore.vllm.identity.fingerprint import UnreadableError

__all__ = ["adapter_files", "model_files"]

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


def model_files(model: Any, load_format: str, download_dir: str | None) -> list[Path]:
    """The weight files of a vLLM `ModelConfig`, and code and quantisation tables beside them.

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
    return _of_kind(files, place, load_format) + _beside(files)


def adapter_files(path: str) -> list[Path]:
    """The files of the LoRA adapter that vLLM calls `path`.

    Raises:
        UnreadableError: if they do not lie on this machine.
    """
    place = _local(os.path.expanduser(path), None, None)
    files = _entries(place)
    weights = [found for found in files if found.suffix in KINDS and found.name not in TRAINING]
    if not weights:
        raise UnreadableError(f"{place}: no weight files")
    return weights + [found for found in files if found.name == "adapter_config.json"]


def _local(name: str, revision: str | None, download_dir: str | None) -> Path:
    if "://" in name:
        raise UnreadableError(f"{name}: not on this machine")
    if os.path.exists(name):
        return Path(name)
    snapshot = _hub_snapshot(name, revision, download_dir)
    if snapshot is None:
        raise UnreadableError(f"{name}: neither a folder nor in the model hub's cache")
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


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise UnreadableError(f"{folder}: {error.strerror}") from error


def _of_kind(files: list[Path], folder: Path, load_format: str) -> list[Path]:
    preferred = PREFERRED.get(load_format)
    for kind in (preferred, *KINDS) if preferred else KINDS:
        found = [path for path in files if path.suffix == kind and path.name not in TRAINING]
        if found:
            return found
    raise UnreadableError(f"{folder}: no weight files of a kind that is known")


def _beside(files: list[Path]) -> list[Path]:
    return [
        path
        for path in files
        if path.suffix == ".py" or (path.suffix == ".json" and "quant" in path.name)
    ]
