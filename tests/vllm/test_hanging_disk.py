"""A real vLLM server over a disk that hangs: it sleeps, wakes up, serves and ends in time."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.serving.servers import BLOCK, Server, offload
from examples.tiny_model import write_model
from tests.faults.conftest import FaultyDisk, faulty
from tests.patience import until
from tests.vllm.engines import ForkedServer

__all__ = ["faulty"]

pytestmark = pytest.mark.vllm

DRAIN = 2.0
"""kvstore's `shutdown_timeout_s`. vLLM has a longer one, or it would kill the engine first."""

BUSY = 10.0
"""Seconds that a busy machine may add; a disk that hangs would add all there are."""


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps(body).encode() if body is not None else b"",
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        raw = answer.read()
    return json.loads(raw) if raw else None


def complete(server: Server, first: int) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": [first + token for token in range(8 * BLOCK)],
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    tokens: list[int] = post(server, "/v1/completions", body)["choices"][0]["token_ids"]
    return tokens


def test_a_server_over_a_disk_that_hangs_sleeps_wakes_and_ends_in_time(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    write_model(tmp_path / "model")
    extra = offload("kvstore", 64 * 2**20, 256 * 2**20, faulty.path / "cache")
    assert extra is not None
    extra |= {"shutdown_timeout_s": DRAIN, "recompute_s": 0}
    extra["tiers"][0] |= {"io": "buffered", "segment_bytes": "16MiB"}
    log = tmp_path / "log"
    server = ForkedServer(
        "kvstore",
        tmp_path / "model",
        log,
        extra,
        device_blocks=64,
        max_tokens=16 * BLOCK,
        more=("--shutdown-timeout", "60"),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    try:
        server.wait_until_up()
        first = complete(server, 100)
        with faulty.hanging("write", path="segment"):
            complete(server, 500)
            began = time.monotonic()
            post(server, "/sleep?level=1")
            slept = time.monotonic() - began
            post(server, "/wake_up")
            assert complete(server, 100) == first
            complete(server, 900)
            began = time.monotonic()
            # A process with a call that hangs in the kernel cannot end; what it waits for can.
            server.terminate()
            until(lambda: "kvstore: closed" in log.read_text())
            ended = time.monotonic() - began
    finally:
        server.stop()
    print(f"slept in {slept:.1f} s, ended in {ended:.1f} s")
    assert slept < DRAIN + 1 + BUSY
    assert ended < DRAIN + 1 + BUSY
