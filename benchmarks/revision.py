"""Another revision of this project, for benchmarks that measure before and after."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "checked_out"]

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def checked_out(revision: str, tree: Path) -> Iterator[Path]:
    """A tree of `revision` at `tree`, which does not exist before and after."""
    add = ["git", "worktree", "add", "--detach", str(tree), revision]
    subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
    try:
        yield tree
    finally:
        remove = ["git", "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, cwd=ROOT, check=True)
