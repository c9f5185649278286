"""A copy of the project as it is now, to be changed and tried out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["ROOT", "copy_project"]

ROOT = Path(__file__).resolve().parents[1]


def copy_project(folder: Path, *, compiled: bool = True) -> None:
    """Copy what git knows of, or would take; with the modules in C that are compiled here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    if compiled:
        names |= {str(file.relative_to(ROOT)) for file in ROOT.glob("[pt]*/**/_*.so")}
    for name in sorted(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
