"""Chunks to put, and stores to put them into."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore.api.store import Store
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, TOO_LONG

CHUNK = 4096


def keys_of(prompt: str, count: int, start: int = 0) -> list[bytes]:
    return [
        hashlib.sha256(f"{prompt}/{depth}".encode()).digest() + b"\0\0\0\0"
        for depth in range(start, count)
    ]


def payload(key: bytes, size: int = CHUNK) -> bytes:
    return hashlib.shake_128(key).digest(size)


def payloads(keys: Sequence[bytes], size: int = CHUNK) -> list[bytes]:
    return [payload(key, size) for key in keys]


def small(path: Path, rows: int = 8, disk: int = 0, **more: Any) -> dict[str, Any]:
    """The configuration of a small store; `disk` is the capacity of its disk tier, in chunks.

    Its deadlines are so long that nothing is a miss because the machine is slow.
    """
    size = more.get("chunk_bytes", CHUNK)
    tiers = []
    if disk:
        # One segment more than its payload: headers need room too.
        tiers = [
            {
                "type": "disk",
                "path": path,
                "capacity_bytes": (disk + 16) * size + 2**20,
                "segment_bytes": 16 * size + 2**14,
            }
        ]
    return {
        "chunk_bytes": size,
        "cpu_bytes_to_use": rows * size,
        "identity": {},
        "tiers": tiers,
        "deadline_s": TOO_LONG,
        "max_wait_s": TOO_LONG,
        "shutdown_timeout_s": PATIENCE,
        **more,
    }


T = TypeVar("T")
Open = Callable[..., AbstractAsyncContextManager[Store]]


async def contents(store: Store, keys: Sequence[bytes]) -> list[bytes]:
    async with store.get(keys) as chunks:
        return [bytes(chunk) for chunk in chunks]


async def filled(store: Store, prompt: str, count: int) -> list[bytes]:
    """Put so many chunks of a prompt, for which there is room; returns their keys."""
    keys = keys_of(prompt, count)
    assert await store.put(keys, payloads(keys)) == count
    return keys


async def on_disk(open_store: Open, *prompts: Sequence[bytes], **config: Any) -> None:
    """Leave chunks on disk, and nothing in host memory."""
    async with open_store(**{"rows": 64, "disk": 256, **config}) as store:
        for keys in prompts:
            assert await store.put(keys, payloads(keys), durable=True) == len(keys)


async def waits(call: Coroutine[Any, Any, T], seconds: float = 0.05) -> asyncio.Task[T]:
    """Begin a call that cannot end yet; it does not within these seconds."""
    task = asyncio.create_task(call)
    await asyncio.sleep(seconds)
    assert not task.done()
    return task


def busy(store: Store) -> int:
    return store.stats().busy_rows


def hurry(store: Store, seconds: float) -> None:
    """From now on nobody is waited for any longer than this without movement."""
    store._core._queue.deadline = store._puts._deadline = seconds


def slow(monkeypatch: pytest.MonkeyPatch, method: str, seconds: float) -> None:
    """Let a method of the disk tier take its time."""
    real = getattr(DiskTier, method)

    async def slowed(self: DiskTier, *args: Any) -> Any:
        await asyncio.sleep(seconds)
        return await real(self, *args)

    monkeypatch.setattr(DiskTier, method, slowed)


def hold(
    monkeypatch: pytest.MonkeyPatch, method: str, of: Collection[bytes] = ()
) -> threading.Event:
    """Let a method of the disk tier wait until the event is set.

    Args:
        of: only calls whose first key is one of these wait.
    """
    gate = threading.Event()
    real = getattr(DiskTier, method)

    async def held(self: DiskTier, *args: Any) -> Any:
        while not gate.is_set() and (not of or args[0][0] in of):
            await asyncio.sleep(0.001)
        return await real(self, *args)

    monkeypatch.setattr(DiskTier, method, held)
    return gate


def program(code: str, *arguments: object, options: Sequence[str] = ()) -> tuple[int, str, str]:
    """The status, the output and the errors of a program in Python."""
    words = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


def answer(value: object) -> Callable[..., Awaitable[object]]:
    """A method of a tier that does nothing but answer."""

    async def method(self: object, *args: object) -> object:
        return value

    return method


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
