"""Pool: pages of one host pool of SGLang, as chunks of a store."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_model, get_spec

import kvstore
from kvstore.api.arguments import targets_of
from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.types import about

__all__ = ["BATCH_SECONDS", "Moves", "Pool", "keys_of", "leading", "served"]

logger = logging.getLogger("kvstore")

DRAFT = "draft"
"""How the names of pools of a draft model begin."""

MOST_ASKED = 64
"""Pages of states that a store is asked about, one by one, for one prompt."""

BATCH_SECONDS = 8.0
"""After so long nothing more of a batch is moved. To flush its cache SGLang waits ten seconds for
the thread that moves one, and then fails."""

ELSEWHERE = (
    "it would reach the pages of one pool and one rank alone; SGLang's "
    "/hicache/storage-backend/clear forgets all pages"
)
"""Why the control socket takes no command that forgets chunks."""

_Bytes = npt.NDArray[np.uint8]


class Pool:
    """Pages of one host pool of SGLang, as chunks of a store.

    Attributes:
        page_bytes: size of a page. bytes: of the whole pool.
        dtypes: kinds of numbers in a page, by their names in the pool; states have several.
        by_heads: whether ranks hold different heads of the same tokens.
        format: what pages must have in common to be exchanged.
    """

    def __init__(self, name: str, pool: Any, *, in_place: bool) -> None:
        self.name = name
        self._pool = pool
        self._in_place = in_place
        self._store: kvstore.SyncStore | None = None
        self._asks = False
        self._piece = 1
        try:
            if in_place:
                _, parts = pool.get_page_buffer_meta(torch.arange(pool.page_size))
            else:
                page = pool.get_dummy_flat_data_page()
                parts = [page.numel() * page.element_size()]
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise KVStoreError(
                f"SGLang's pool {name} ({type(pool).__name__}) has no pages that can be stored "
                f"{'in place' if in_place else 'as tensors'}: {error}"
            ) from error
        self.dtypes = {
            name: str(value).removeprefix("torch.")
            for name, value in sorted(vars(pool).items())
            if isinstance(value, torch.dtype)
        }
        self.layers = [getattr(pool, name, None) for name in ("start_layer", "end_layer")]
        self.is_draft = name.startswith(DRAFT)
        # Layers of a draft model may lie behind those of the target. Not every pool says so.
        target = getattr(pool, "target_layer_num", None)
        self.may_have_draft = self.is_draft or target is None or pool.layer_num > target
        self.by_heads = isinstance(pool, MHATokenToKVPoolHost)
        self.page_bytes = sum(parts)
        self.bytes = pool.size * pool.size_per_token
        if not self.page_bytes or not self.bytes:
            raise KVStoreError(f"SGLang's pool {name} has no pages of its own: it cannot be stored")
        self.format = {
            "dtypes": self.dtypes,
            "layout": str(pool.layout),
            "page_tokens": pool.page_size,
            "parts": list(parts),
            "interface": "memory" if in_place else "tensor",
        }

    @property
    def store(self) -> kvstore.SyncStore:
        """The open store.

        Raises:
            KVStoreError: when it is closed.
        """
        if self._store is None:
            raise KVStoreError(f"the store of SGLang's pool {self.name} is closed")
        return self._store

    def open(self, config: Config) -> None:
        self._store = store = kvstore.open_sync(config)
        for command in ("remove", "reset"):
            store.refuse_command(command, ELSEWHERE)
        self._asks = any(tier.is_store for tier in config.tiers)
        # Two pieces fit: one is copied while the next is fetched.
        self._piece = max(1, store.stats().rows // 2)
        logger.info(
            "kvstore: pool %s, pages of %d bytes, %s", self.name, self.page_bytes,
            store.description, extra=about("sglang.opened", pool=self.name),
        )  # fmt: skip

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading pages there are. Shared stores are asked, and fetched from.

        After `BATCH_SECONDS` those that were not found yet count as absent.
        """
        chunks, end = keys_of(keys), time.monotonic() + BATCH_SECONDS
        found = self.store.contains_prefix(chunks)
        while self._asks and found < len(chunks):
            piece = chunks[found : found + self._piece]
            more = self._resolved(piece, end)
            found += more
            if more < len(piece):
                break
        return found

    def each(self, keys: Sequence[str]) -> list[bool]:
        """Whether it is there, for each page; of the last `MOST_ASKED` stores are asked, too."""
        chunks, end = keys_of(keys), time.monotonic() + BATCH_SECONDS
        there = self.store.contains(chunks)
        if self._asks:
            for at in range(max(0, len(chunks) - MOST_ASKED), len(chunks)):
                there[at] = there[at] or self._resolved([chunks[at]], end) == 1
        return there

    def _resolved(self, chunks: Sequence[bytes], end: float) -> int:
        """How many leading chunks there are, as far as stores have told by `end`."""
        left = end - time.monotonic()
        if left <= 0:
            return 0
        try:
            return self.store.resolve(chunks, timeout=left)
        except TimeoutError:
            return 0

    def read(self, keys: Sequence[str], indices: torch.Tensor) -> Iterator[int]:
        """Copy the leading pages to the pool; counts them, piece by piece, for `BATCH_SECONDS`."""
        return self._read(keys, self._places(indices, len(keys)), self._fill)

    def read_into(self, keys: Sequence[str], buffers: Sequence[object]) -> Iterator[int]:
        """Copy the leading pages to buffers, as `read` does."""
        yield from self._read(
            keys, iter(targets_of(buffers, len(keys), self.page_bytes)), np.copyto
        )

    def _read(
        self, keys: Sequence[str], places: Iterator[Any], fill: Callable[[Any, _Bytes], None]
    ) -> Iterator[int]:
        end = time.monotonic() + BATCH_SECONDS
        with self.store.windows(keys_of(keys), self._piece) as windows:
            for chunks in windows:
                taken = list(islice(places, len(chunks)))
                for at, place in enumerate(taken):
                    fill(place, chunks.array(at, np.uint8))
                yield len(taken)
                if time.monotonic() >= end:
                    return

    def write(
        self,
        keys: Sequence[str],
        indices: torch.Tensor,
        timeout: float,
        turn: AbstractContextManager[object],
        valid: Callable[[], bool],
    ) -> Iterator[int]:
        """Store pages of the pool; counts them, piece by piece, to the first that is shed.

        After `BATCH_SECONDS` no more are.

        Args:
            turn: held while a piece is read and stored.
            valid: whether the pages are still those of the model's weights; else no more are read.
        """
        places, chunks = self._places(indices, len(keys)), keys_of(keys)
        end = time.monotonic() + BATCH_SECONDS
        for start in range(0, len(chunks), self._piece):
            piece = chunks[start : start + self._piece]
            with turn:
                if not valid():
                    return
                pages = [self._page(place) for place in islice(places, len(piece))]
                left = max(0.0, end - time.monotonic())
                stored = self.store.put(piece, pages, timeout=min(timeout, left))
            yield stored
            if stored < len(piece) or time.monotonic() >= end:
                return

    def _places(self, indices: torch.Tensor, count: int) -> Iterator[Any]:
        """Where each page lies: the parts of its memory, or its first slot."""
        size = self._pool.page_size
        if len(indices) != count * size:
            raise KVStoreError(f"{len(indices)} slots for {count} pages of {size}")
        if not self._in_place:
            yield from indices[::size].tolist()
            return
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        parts = map(_memory, pointers, sizes)
        each = len(self.format["parts"])
        while page := list(islice(parts, each)):
            yield page

    def _page(self, place: Any) -> _Bytes | torch.Tensor:
        """The bytes of a page."""
        if not self._in_place:
            page: torch.Tensor = self._pool.get_data_page(place, flat=True)
            return page.contiguous().view(torch.uint8)
        return place[0] if len(place) == 1 else np.concatenate(place)

    def _fill(self, place: Any, chunk: _Bytes) -> None:
        """Write a chunk to where its page lies. NumPy copies without holding the interpreter."""
        if not self._in_place:
            page = self._pool.get_dummy_flat_data_page()
            page.view(torch.uint8).reshape(-1).numpy()[:] = chunk
            self._pool.set_from_flat_data_page(place, page)
            return
        start = 0
        for part in place:
            part[:] = chunk[start : start + part.size]
            start += part.size


@attrs.define
class Moves:
    """Transfers in one direction since SGLang last asked."""

    pages: list[int] = attrs.field(factory=list)
    gbps: list[float] = attrs.field(factory=list)

    LIMIT = 10_000
    """Transfers that are kept for a caller who never asks."""

    def note(self, pages: int, size: int, seconds: float) -> None:
        if pages and len(self.pages) < self.LIMIT:
            self.pages.append(pages)
            self.gbps.append(pages * size / 1e9 / seconds)


COUNTS = ("revision", "quantization", "quantization_param_path", "json_model_override_args")
"""Settings of SGLang's model that decide what the numbers of its KV cache are."""


def served() -> dict[str, Any]:
    """What SGLang's server was told of numbers and of a draft model; nothing without a server."""
    try:
        model, spec = get_model(), get_spec()
    except ValueError:
        return {}
    draft = None
    if (model_path := spec.speculative_draft_model_path) is not None:
        revision = spec.speculative_draft_model_revision
        draft = [model_path, revision, spec.speculative_draft_kv_cache_dtype]
    # Those of NVIDIA and of AMD have one name.
    numbers = f"{model.kv_cache_dtype}{' of ROCm' if torch.version.hip else ''}"
    told = {name: getattr(model, name, None) for name in COUNTS}
    return {
        "kv_cache_dtype": numbers,
        "draft": draft,
        "settings": {name: value for name, value in told.items() if value not in (None, "", "{}")},
    }


def _memory(pointer: int, size: int) -> _Bytes:
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(pointer))


def leading(count: int, keys: Sequence[str]) -> list[bool]:
    """Whether each of the keys is among the first `count`."""
    return [at < count for at in range(len(keys))]


def keys_of(names: Sequence[str]) -> list[bytes]:
    """SGLang's names of pages, hashes of the prompt so far in hex, as keys."""
    return [_key(name) for name in names]


def _key(name: str) -> bytes:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        key = b""
    # A name that is no hash is hashed.
    return key if len(key) == 32 else hashlib.sha256(name.encode()).digest()
