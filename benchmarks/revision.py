"""Another revision of this project, for benchmarks that measure before and after."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "checked_out"]

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def checked_out(revision: str, tree: Path) -> Iterator[Path]:
    """A tree of `revision` at `tree`, which does not exist before and after.

    Its C modules are compiled if those of this tree are, so that like is compared with like.
    """
    add = ["git", "worktree", "add", "--detach", str(tree), revision]
    subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
    try:
        if any((ROOT / "policies").glob("*.so")):
            build = [
                sys.executable,
                "-c",
                "import setuptools; setuptools.setup()",
                "-q",
                "build_ext",
            ]
            subprocess.run([*build, "--inplace"], cwd=tree, check=True, capture_output=True)
        yield tree
    finally:
        remove = ["git", "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, cwd=ROOT, check=True)
