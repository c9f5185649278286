"""The only place that asks kvstore: chunks of prompts by the hash of all their tokens.

A fault of the store never fails a request: what cannot be loaded is computed, what
cannot be saved is computed again the next time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import kvstore

__all__ = ["PromptCache", "keys_of"]

logger = logging.getLogger("http_server")

GROUP = b"\0\0\0\0"
"""The index of the only KV-cache group, with which every key ends."""

T = TypeVar("T")


def keys_of(tokens: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """A key for each full chunk of `tokens`, which stands for all tokens up to its end."""
    keys, digest = [], b""
    for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
        chunk = array("I", tokens[end - chunk_tokens : end])
        digest = hashlib.sha256(digest + chunk.tobytes()).digest()
        keys.append(digest + GROUP)
    return keys


class PromptCache:
    """Chunks of KV cache in `store`.

    A request names itself in every call, and is released once: so calls of equal
    prompts at the same time are told apart.
    """

    def __init__(self, store: kvstore.Store) -> None:
        self._store = store

    async def load(
        self, request: str, keys: Sequence[bytes], copy: Callable[[Sequence[memoryview]], T]
    ) -> tuple[int, T]:
        """Find the longest prefix of `keys` there is; waits for the disk where it must.

        Args:
            copy: called in a thread, with the chunks; must not keep them.

        Returns:
            How many chunks there were, and what `copy` made of them.
        """
        try:
            async with self._store.get(keys, request) as chunks:
                return len(chunks), await _in_thread(copy, chunks)
        except kvstore.KVStoreError as error:
            logger.warning("nothing is loaded: %s", error)
            return 0, copy([])

    def held(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks need not be saved."""
        try:
            return self._store.contains_prefix(keys)
        except kvstore.KVStoreError as error:
            logger.warning("nothing is looked up: %s", error)
            return 0

    async def save(
        self,
        request: str,
        keys: Sequence[bytes],
        chunks: Callable[[], Sequence[object]],
        *,
        wait: bool = True,
    ) -> None:
        """Store what `chunks`, called in a thread, returns for `keys`; perhaps waiting for room."""
        if not keys:
            return
        try:
            await self._store.put(keys, await asyncio.to_thread(chunks), request, wait=wait)
        except kvstore.KVStoreError as error:
            logger.warning("nothing is saved: %s", error)

    def release(self, request: str) -> None:
        """The request asks no more."""
        self._store.release(request)


async def _in_thread(work: Callable[[Sequence[memoryview]], T], chunks: Sequence[memoryview]) -> T:
    """Run `work`, to its end even if the caller is cancelled: it reads what the caller leases."""
    task = asyncio.ensure_future(asyncio.to_thread(work, chunks))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
