"""Why an engine starts cold: other namespaces of the model on its paths, and how they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.tiers.disk.namespace import read_namespace

__all__ = ["siblings"]

MAX_TOLD = 6
"""Of the settings in which two engines differ, so many are named."""


def siblings(identity: Mapping[str, Any], paths: Iterable[Path]) -> list[str]:
    """One line for each namespace of the same model that differs; none if one is the same."""
    lines = []
    for path in paths:
        for folder in _folders(path):
            try:
                theirs = read_namespace(folder)["identity"]
            except (KVStoreError, OSError):
                continue
            if theirs.get("model") != identity.get("model"):
                continue
            names = sorted(
                name
                for name in identity.keys() | theirs.keys()
                if name not in ("chunk_bytes", "slot_bytes")
                and identity.get(name) != theirs.get(name)
            )
            if not names:
                return []
            rest = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
            told = ", ".join(names[:MAX_TOLD])
            lines.append(f"{folder} is of the same model and differs in {told}{rest}")
    return lines


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(folder for folder in path.iterdir() if folder.is_dir())
    except OSError:
        return []
