"""Which vLLM is run, which are refused and which are warned of."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvstore.errors import ConfigError
from kvstore.vllm import version
from kvstore.vllm.version import NEWEST, OLDEST, check_version, version_of


def test_the_tests_run_with_the_vllm_that_was_asked_for() -> None:
    wanted = os.environ.get("KVSTORE_VLLM", "0.32")
    program = (
        "import importlib.util, runpy; places = importlib.util.find_spec('vllm')"
        ".submodule_search_locations; "
        "print(runpy.run_path(places[0] + '/_version.py')['__version__'])"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found = told.stdout.split()[-1]
    assert found.startswith(f"{wanted}."), "an engine in a process of its own"
    assert version_of(wanted + ".0") == version.VERSION


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.32.0", (0, 32)),
        ("0.33.1rc2+cpu", (0, 33)),
        ("0.33.1.dev12+gabcdef", (0, 33)),
        ("1.2.3", (1, 2)),
        ("0.1.dev1+gabcdef", version.UNKNOWN),
        ("dev", version.UNKNOWN),
    ],
)
def test_a_version_is_read(text: str, expected: tuple[int, int]) -> None:
    assert version_of(text) == expected


def test_one_that_is_too_old_is_refused_and_what_is_supported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.28\.0 is not supported.* 0\.29 to 0\.33"):
        check_version("0.28.0")


def test_one_that_lacks_the_interface_is_refused_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.20.2"\n')
    done = subprocess.run(
        [sys.executable, "-c", "import kvstore.vllm as v; v.KVStoreOffloadingSpec"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvstore.errors.ConfigError: vLLM 0.20.2 is not supported"), done.stderr


@pytest.mark.parametrize("supported", [OLDEST, NEWEST])
def test_what_was_tried_is_taken_without_a_word(
    supported: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstore"):
        check_version("{}.{}.0".format(*supported))
    assert not caplog.messages


@pytest.mark.parametrize("text", ["0.34.0", "1.0.0", "0.1.dev1+gabcdef"])
def test_of_one_that_nobody_has_tried_one_line_warns(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstore"):
        check_version(text)
    (line,) = caplog.messages
    assert text in line
    assert "not tried" in line
