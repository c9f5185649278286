"""Every block of the tutorials runs, in order, in an empty folder, and shows what the page says.

A `bash` block is run. A comment before it says otherwise: `install` is not run, as the environment
is there; `server` runs beside the others until the page ends; `restart` is the server again. A
`python` block after "Save as" is written to that file. A `text` block is what the block before it
shows: lines in that order; hashes and times may differ, and "..." stands for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.server_process import free_port
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


BLOCK = re.compile(
    r"^(?:Save as `(?P<title>[^`]+)`:\n\n|<!-- (?P<mark>\w+) -->\n)?"
    r"```(?P<language>\w+)\n(?P<text>(?:.*\n)*?)```$",
    re.MULTILINE,
)


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    fences = text.count("\n```")
    for found in BLOCK.finditer(text):
        fences -= 2
        kind = f"{found['language']} {found['mark'] or ''}".strip()
        line = text.count("\n", 0, found.start()) + 1
        yield Block(kind, found["title"] or "", found["text"], line)
    assert fences == 0, f"{page.name}: a block that is not understood"


FORKS = """\
import multiprocessing

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork
"""
"""vLLM's own way, but for a model on a CPU: its three processes import everything once."""


class Server:
    """What a `bash server` block starts."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str], port: int) -> None:
        self._text, self._folder = text, folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(FORKS)
        paths = f"{folder / 'site'}:{environment['PYTHONPATH']}"
        self._environment = {**environment, "PYTHONPATH": paths}
        self._url = f"http://localhost:{port}/health"
        self._log = folder / "server.log"
        self._begun = 0
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._begun = log.tell()
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
        raise AssertionError(self._told()[-4000:])

    def _told(self) -> str:
        """What it has logged since it was started last."""
        return self._log.read_bytes()[self._begun :].decode(errors="replace")

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGINT)
            self._running.wait(PATIENCE)
            # Whatever its own server sends to the engine in the meantime, unless the engine hangs
            # before it begins to end: see docs/vllm.md, "Two signals at once".
            told = self._told()
            hung = "force killing remaining process EngineCore" in told
            hung &= "EngineCore: start mode" not in told
            lines = [line[:200] for line in told.splitlines() if "leaked" not in line]
            closed = "kvstore: closed, 0 chunks not copied" in told
            assert closed or hung, "\n".join(lines[-60:])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)


def alike(line: str) -> str:
    """A line without what differs each time: hashes, times, and the width of columns."""
    line = re.sub(r"-[0-9a-f]{12}\b", "-#", line)
    line = re.sub(r"\b\d+(\.\d+)? ?(s|min)\b", "# s", line)
    return " ".join(line.split())


def check_shown(shown: str, expected: str, where: str) -> None:
    """Each expected line is among those shown, in that order."""
    lines = iter([alike(line) for line in shown.splitlines()])
    for line in expected.splitlines():
        parts = [re.escape(part) for part in alike(line).split("...")]
        pattern = re.compile(".*".join(parts))
        assert any(pattern.fullmatch(each) for each in lines), f"{where}: {line!r} in\n{shown}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.vllm] * (page.stem == "vllm"))
        for page in PAGES
    ],
)
def test_every_block_runs_and_shows_what_the_page_says(page: Path, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / TRACE.name).symlink_to(TRACE)
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
                    timeout=4 * PATIENCE,
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
