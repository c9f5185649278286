"""The three servers: without offload, with vLLM's own tiering, and with kvstore."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.server_process import free_port

__all__ = ["NAMES", "Server", "cached_by_source", "counters", "offload"]

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("none", "native", "kvstore")
BLOCK = 32
"""Tokens of a block on the device, and of a chunk."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The worker in the process of the scheduler, as on one GPU. Of two processes each spins on a
    # core while it waits for the other, and the model has only what is left.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads of a model that wait do not take the cores from the other servers.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(ROOT),
}


def offload(name: str, host_bytes: int, disk_bytes: int, folder: Path) -> dict[str, Any] | None:
    """The connector's options of one of `NAMES`.

    vLLM's file tier has no capacity: `disk_bytes` must be more than a run writes, so that
    both disks keep everything.
    """
    if name == "native":
        return {
            "spec_name": "HostTieringOffloadingSpec",
            "spec_module_path": "benchmarks.serving.native",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        }
    if name == "kvstore":
        return {
            "cpu_bytes_to_use": host_bytes,
            "tiers": [{"type": "disk", "path": str(folder), "capacity_bytes": disk_bytes}],
        }
    return None


class Server:
    """One vLLM API server in a process group of its own.

    vLLM's command `serve` runs this module; under the name `vllm-cpu` only the module starts.

    Args:
        tokenizer: whether it reads and writes text; else tokens only.
        wrap: the command that runs it. more: further arguments of vLLM.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None,
        *,
        device_blocks: int,
        max_tokens: int,
        tokenizer: bool = False,
        wrap: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.port = free_port()
        self._engine_id = uuid.uuid4().hex
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += [] if tokenizer else ["--skip-tokenizer-init"]
        command += ["--seed", "0", "--enforce-eager"]
        command += ["--dtype", "float32"]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(device_blocks)]
        command += ["--max-model-len", str(max_tokens), "--enable-prompt-tokens-details"]
        command += ["--distributed-executor-backend", "uni"]
        command += ["--disable-uvicorn-access-log", *more]
        if extra is not None:
            ours = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.vllm"}
            theirs = {"kv_connector": "OffloadingConnector"}
            connector = {
                **(theirs if "spec_name" in extra else ours),
                "kv_role": "kv_both",
                "engine_id": self._engine_id,
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(connector)]
        self._process = self._started([*wrap, *command])

    def _started(self, command: list[str]) -> subprocess.Popen[bytes]:
        """The process of a command, in a session of its own."""
        with self.log.open("w") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
                cwd=self.log.parent,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_up(self, seconds: float = 300) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: with the end of its log, if it does not.
        """
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.25)
        tail = "\n".join(self.log.read_text().splitlines()[-40:])
        raise RuntimeError(f"the server {self.name!r} did not start:\n{tail}")

    def wait_until_idle(self, seconds: float = 60) -> float:
        """Wait until it neither computes nor writes; returns how long that took.

        What one server still has to do must not be in the measure of the next.
        """
        started, quiet = time.monotonic(), 0
        before = self.activity()
        while quiet < 2 and time.monotonic() - started < seconds:
            time.sleep(0.25)
            now = self.activity()
            busy = now[0] - before[0] > 0.04 or now[1] != before[1]
            quiet, before = (0 if busy else quiet + 1), now
        return max(0.0, time.monotonic() - started - 0.5)

    def activity(self) -> tuple[float, int]:
        """Seconds of processor time and bytes written so far, of all its processes."""
        seconds, written = 0.0, 0
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            for process in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds += times.user + times.system
                    written += process.io_counters().write_bytes
        return seconds, written

    def metrics(self) -> str:
        """What it tells Prometheus."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def terminate(self) -> None:
        """Ask it to end, as an operator does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Let it end, and see that nothing of it stays."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in Path("/dev/shm").glob(f"vllm_offload_{self._engine_id}*"):
            path.unlink(missing_ok=True)


def cached_by_source(metrics: str) -> dict[str, int]:
    """Prompt tokens that were not computed, by where they came from."""
    line = re.compile(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)$')
    found = (line.match(text) for text in metrics.splitlines())
    return {match[1]: int(float(match[2])) for match in found if match}


def counters(metrics: str) -> dict[str, int]:
    """What the caches themselves have counted, kvstore's and vLLM's, by name."""
    line = re.compile(r"^vllm:((?:kvstore|kv_offload)_\w+)_total(?:\{.*\})? (\S+)$")
    found: dict[str, int] = {}
    for match in filter(None, map(line.match, metrics.splitlines())):
        # One line for each tier.
        found[match[1]] = found.get(match[1], 0) + int(float(match[2]))
    return found
