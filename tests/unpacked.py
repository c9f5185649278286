"""Unpacks a package that cannot be installed here, as it wants CUDA's, or is wanted by no other.

    python -m tests.unpacked sglang

The file is checked against a digest. A folder that is there is left alone, without a word.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.vllm.overlay import OverlayError, Release, download, unpack_wheel

RELEASES = {
    "sglang": (
        "0.5.23",
        Release("sglang", "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"),
    ),
    "lmcache": (
        "0.5.6",
        Release("lmcache", "14530ff72b96056e894c9b8dc70c10d019e7802799bbfde9cec298700b799194"),
    ),
}


def folder_of(name: str) -> Path:
    """Where the package is, or will be."""
    return Path(__file__).parents[1] / f".{name}-{RELEASES[name][0]}"


def make(name: str) -> Path:
    """Unpack the package, unless it is there already; returns the folder that has it.

    Raises:
        OverlayError: with what is not as expected; the folder is then not there.
    """
    version, release = RELEASES[name]
    folder = folder_of(name)
    if (folder / name / "__init__.py").is_file():
        return folder
    if folder.exists():
        raise OverlayError(f"{folder} is there, and holds no {name}")
    print(f"making {folder.name} (once)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as work:
        new = Path(work) / "new"
        unpack_wheel(download(version, release, Path(work)), new)
        new.rename(folder)
    return folder


if __name__ == "__main__":
    try:
        make(sys.argv[1])
    except OverlayError as error:
        sys.exit(f"unpacked: {error}")
