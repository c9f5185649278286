"""The kernel's tests pass in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

TESTS = Path(__file__).with_name("test_kernel.py")


def test_the_kernel_copies_right_where_it_is_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS)]
    ended = subprocess.run(
        [*command, "-k", "interpreted", "--color", "no"],
        cwd=TESTS.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "-v"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None, ended.stdout
    # Each test of the file, with all its parameters: none was left out.
    assert int(passed[1]) == 10 + 5 + 1 + 1
    assert "skipped" not in ended.stdout
