"""Run the tests of what is written in C with its address and undefined-behaviour sanitizers on.

    python -m tests.sanitize [TESTS]

It needs gcc with libasan and libubsan. The modules are built in a copy of the project.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.copied import copy_project

MODULES = ("policies/_table", "tiers/_codec", "tiers/disk/io/_aio")

TESTS = (
    "tests/policies",
    "tests/tiers/test_codec.py",
    "tests/tiers/test_io.py",
    "tests/tiers/test_disk_contract.py",
)

FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"),
    *("-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Werror"),
)


def build(folder: Path) -> None:
    """Compile the modules beside their sources, with the sanitizers."""
    include, suffix = sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX")
    for module in MODULES:
        command = ["gcc", "-shared", "-fPIC", *FLAGS, f"-I{include}", f"{module}.c"]
        subprocess.run([*command, "-o", f"{module}{suffix}"], cwd=folder, check=True)


def library(name: str) -> str:
    """Where gcc has one of its libraries."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Build and run; the status of pytest."""
    with tempfile.TemporaryDirectory(prefix="kvstore-sanitize-") as scratch:
        folder = Path(scratch)
        copy_project(folder, compiled=False)
        build(folder)
        environment = {
            **os.environ,
            "PYTHONPATH": scratch,
            # Python itself keeps memory until its end, and its own allocator would hide faults.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["--disable-warnings"]
        command += ["-m", "not slow", "--timeout", "600", *(sys.argv[1:] or TESTS)]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
