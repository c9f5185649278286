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
    add = ["git", "worktree", "add", "--quiet", "--detach", str(tree), revision]
    subprocess.run(add, cwd=ROOT, check=True)
    try:
        if any((ROOT / "policies").glob("*.so")):
            setup = "import setuptools; setuptools.setup()"
            build = [sys.executable, "-W", "ignore", "-c", setup, "-q", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True)
        yield tree
    finally:
        remove = ["git", "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, cwd=ROOT, check=True)
