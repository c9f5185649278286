"""Every block of the tutorials runs, in order, in an empty folder, and shows what the page says.

A fenced block is `bash` (run), `bash install` (not run: the environment is there), `bash server`
(run beside the others until the page ends), `bash restart` (the server again), `python` with a
title (written to that file), or `text` (what the block before it shows; * and ... stand for
anything).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from examples.tiny_model import CONFIG
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent

PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))

TRACE = ROOT / "benchmarks/traces/mooncake_conversation.jsonl.xz"


@dataclass
class Block:
    """One fenced block."""

    kind: str
    title: str
    text: str
    line: int


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```(\S+)(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        title = re.search(r'title="([^"]+)"', found[2])
        mark = "" if title else found[2].strip()
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{found[1]} {mark}".strip(), title[1] if title else "", found[3], line)


class Server:
    """What a `bash server` block starts."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str], port: int) -> None:
        self._text, self._folder, self._environment = text, folder, environment
        self._url = f"http://localhost:{port}/health"
        self._log = folder / "server.log"
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(
                ["bash", "-c", self._text],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + 300
        while self._running.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self._url, timeout=5).close()
                return
            time.sleep(0.25)
        raise AssertionError(self._log.read_text()[-4000:])

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGINT)
            self._running.wait(PATIENCE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def check_shown(shown: str, expected: str, where: str) -> None:
    """Each expected line is among those shown, in that order."""
    lines = iter(line.rstrip() for line in shown.splitlines())
    for line in expected.splitlines():
        pattern = line.replace("[", "[[]").replace("...", "*")
        assert any(fnmatchcase(each, pattern) for each in lines), f"{where}: {line!r} in\n{shown}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.vllm] * (page.stem == "vllm"))
        for page in PAGES
    ],
)
def test_every_block_runs_and_shows_what_the_page_says(page: Path, tmp_path: Path) -> None:
    port = free_port()
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    server: Server | None = None
    shown = ""
    try:
        for block in blocks_of(page):
            where = f"{page.name}:{block.line}"
            text = block.text.replace("localhost:8000", f"localhost:{port}")
            text = text.replace(" TRACE ", f" {TRACE} ")
            text = text.replace("--model tiny ", f"--model tiny --port {port} ")
            if block.title:
                (tmp_path / block.title).write_text(block.text)
            elif block.kind == "bash server":
                server = Server(text, tmp_path, environment, port)
                server.start()
            elif block.kind == "bash restart":
                assert server is not None
                server.stop()
                server.start()
            elif block.kind == "bash":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=PATIENCE,
                )
                shown = done.stdout
                assert done.returncode == 0, f"{where}:\n{shown}"
            elif block.kind == "text":
                check_shown(shown, block.text, where)
            else:
                assert block.kind in ("bash install", "toml"), where
    finally:
        if server is not None:
            server.stop()


def test_the_page_on_vllm_speaks_of_the_model_that_is_made() -> None:
    text = (ROOT / "docs/tutorials/vllm.md").read_text()
    assert "seq -s, 1 1100" in text
    assert CONFIG["vocab_size"] > 1100
