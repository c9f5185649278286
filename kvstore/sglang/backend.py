"""HiCacheKVStore: what SGLang calls, over a store for each of its pools."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.config import Config, DiskConfig, TierConfig
from kvstore.core.reports import Complaints
from kvstore.errors import ConfigError, KVStoreError
from kvstore.gate import read_gate
from kvstore.observe.logs import warn_with
from kvstore.sglang.pool import BATCH_SECONDS, Moves, Pool, keys_of, leading, served
from kvstore.sizes import parse_size
from kvstore.types import about

__all__ = ["HiCacheKVStore"]

logger = logging.getLogger("kvstore")

_T = TypeVar("_T")

OWN = "kvstore"
"""Key of SGLang's extra configuration under which kvstore's stands."""

KV = "kv"
"""Name of the pool of attention, which every model has."""

SHARDED = ("mamba",)
"""Pools whose pages differ between ranks even where all ranks hold the same attention."""

LEAST_SECONDS = 1.0
"""What each pool gets to be cleared, also where another has used up the time of all."""

READ, STORED = "read", "stored"
"""What becomes of pages, in messages, too."""

_DECIDED = ("chunk_bytes", "keep_events", "namespace")
"""Keys that follow from SGLang's pools and ranks."""


class HiCacheKVStore(HiCacheStorage):
    """A storage backend of SGLang over tiers of kvstore; for SGLang 0.5.23.

    Each pool of SGLang (attention, states, indexers) has a store of its own. Host memory and disk
    are divided among them as SGLang divides its host memory. Sizes are those of one rank.

    With `interface_v1` pages of attention are copied from and to SGLang's pool, in any layout that
    it has. Without it, and for the other pools, they pass as tensors, which costs one copy more.

    Raises:
        KVStoreError: for a configuration that cannot be used, before the model is loaded.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._engine = storage_config
        extra = storage_config.extra_config or {}
        values = extra.get(OWN)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"missing key {OWN} in hicache-storage-backend-extra-config: a table such as "
                '{"host": "4GiB", "disk": "/nvme/kv", "disk_bytes": "2TiB", '
                '"identity": {"weights": "v1"}}'
            )
        for key in _DECIDED:
            if key in values:
                raise ConfigError(f"{OWN}.{key}: SGLang decides it; leave it out")
        self._config = Config.from_mapping(values)
        if self._config.tenants is not None:
            raise ConfigError(f"{OWN}.tenants: SGLang does not say whose a page is; leave it out")
        self._in_place = bool(extra.get("interface_v1"))
        self._pools: dict[str, Pool] = {}
        self._open = False
        self._complaints = Complaints(warn_with(logger))
        self._moves = {READ: Moves(), STORED: Moves()}
        self._clears = 0
        """Beginnings and ends of clearings: odd while one is under way."""
        self._turn = threading.Lock()
        # No page that was read before a clearing may be stored after it.
        self._storing = threading.Lock()

    # -- pools ---------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of attention.

        Raises:
            KVStoreError: if it has no pages.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self._pools = {KV: Pool(KV, mem_pool_host, in_place=self._in_place)}

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool; one that comes when the stores are open is not kept.

        Raises:
            KVStoreError: if it has no pages.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._pools:
            return
        if self._open:
            logger.warning(
                "kvstore: pool %s came late: its pages are not kept, and prompts that need them "
                "are not found", name, extra=about("sglang.late", pool=name),
            )  # fmt: skip
            return
        self._pools[name] = Pool(name, host_pool, in_place=False)

    def on_host_pools_registered(self) -> None:
        """Open the stores.

        Raises:
            KVStoreError: if a path, or a size after its division among pools, cannot be used.
        """
        whole = sum(pool.bytes for pool in self._pools.values())
        self._open = True
        try:
            for pool in self._pools.values():
                share = pool.bytes / whole
                try:
                    pool.open(self._config_of(pool, share))
                except ConfigError as error:
                    if len(self._pools) == 1:
                        raise
                    raise ConfigError(
                        f"{error} (SGLang's pool {pool.name} gets {share:.1%} of each size)"
                    ) from error
        except BaseException:
            self.close()
            raise

    def _config_of(self, pool: Pool, share: float) -> Config:
        whole = self._config
        held = " and ".join(sorted(set(pool.dtypes.values())))
        for key, path in (("disk_codec", whole.disk_codec), ("store_codec", whole.store_codec)):
            if path is not None and (dtype := read_gate(path).dtype) != held:
                raise ConfigError(
                    f"{key}: the codec encodes {dtype}, and SGLang's pool {pool.name} has {held}"
                )
        engine = self._engine
        of_draft = pool.by_heads and pool.is_draft
        if of_draft and engine.is_mla_model and engine.tp_size > 1:
            raise ConfigError(
                f"SGLang's pool {pool.name} is split by heads, and of a model with latent "
                "attention the first of several ranks alone stores pages: use one rank, or a "
                "draft model with latent attention"
            )
        given = dict(whole.identity or {})
        tiers = [_divided(tier, share) for tier in whole.tiers]
        is_first = pool.name == KV and self._is_first
        return attrs.evolve(
            whole,
            chunk_bytes=pool.page_bytes,
            cpu_bytes_to_use=int(whole.cpu_bytes_to_use * share),
            tiers=tiers,
            identity={**self._identity(pool, given), **given},
            # A socket and a file have one owner; files of other ranks get names of their own.
            control=whole.control if is_first else None,
            control_token_file=whole.control_token_file if is_first else None,
            record_trace=whole.record_trace if pool.name == KV else None,
        )

    @property
    def _is_first(self) -> bool:
        engine = self._engine
        return not (engine.tp_rank or engine.pp_rank or engine.dp_rank or engine.attn_cp_rank)

    def _identity(self, pool: Pool, given: Mapping[str, Any]) -> dict[str, Any]:
        """What makes pages exchangeable; the operator names the weights.

        Raises:
            ConfigError: if it is not known what the numbers in a page are.
        """
        engine, told = self._engine, served()
        numbers = told.get("kv_cache_dtype")
        if pool.dtypes.get("dtype") != "uint8":
            numbers = None
        elif numbers is None and "kv_cache_dtype" not in given:
            raise ConfigError(
                f"{OWN}.identity: SGLang's pool {pool.name} holds bytes, and SGLang does not say "
                'what they are: name it, as in {"kv_cache_dtype": "fp8_e4m3"}'
            )
        # Which layers a stage has may be configured, and the stages still be as large.
        stage = [pool.layers, os.environ.get("SGLANG_PP_LAYER_PARTITION")]
        shared = engine.is_mla_model and pool.name not in SHARDED
        return {
            "model": engine.model_name,
            "engine": "sglang",
            "pool": pool.name,
            "kv_cache_dtype": numbers,
            "draft": told.get("draft") if pool.may_have_draft else None,
            **told.get("settings", {}),
            **pool.format,
            "tp": None if shared else [engine.tp_rank, engine.tp_size],
            "pp": [engine.pp_rank, engine.pp_size, *(stage if engine.pp_size > 1 else ())],
            "cp": [engine.attn_cp_rank, engine.attn_cp_size],
            "dcp": [engine.dcp_rank, engine.dcp_size, engine.logical_page_size],
            "heads": [bool(engine.should_split_heads), engine.tp_lcm_size],
        }

    # -- pages of attention --------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether host memory or a tier has the page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages there are; shared stores are asked, disks are not read."""
        return self._tried("looked up", lambda: self._pools[KV].leading(keys), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Copy the leading pages that there are into SGLang's pool."""
        return leading(self._read(KV, keys, host_indices), keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages from SGLang's pool, in the order of the prompt, as far as there is room."""
        return leading(self._write(KV, keys, host_indices), keys)

    # -- pages of several pools ----------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Return the longest prefix for which every pool has what its policy asks for."""
        found = self.batch_exists(keys)
        hits = {KV: found} if found else {}
        lengths = list(range(1, found + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # It tells only of itself, and is not kept here.
            name = str(transfer.name)
            good = self._usable(name, transfer, keys[:found])
            if good:
                hits[name] = max(good)
            lengths = [length for length in lengths if length in good]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Copy the leading pages of each transfer into its pool."""
        return self._transfer(transfers, self._read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Store the pages of each transfer from its pool."""
        return self._transfer(transfers, self._write)

    def _usable(self, name: str, transfer: PoolTransfer, keys: Sequence[str]) -> set[int]:
        """Lengths of the prefix at which this pool has what is needed."""
        pool = self._pools.get(name)
        if pool is None:
            return set()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            leading = self._tried("looked up", lambda: pool.leading(keys), 0)
            return set(range(1, leading + 1))
        there: list[bool] = self._tried("looked up", lambda: pool.each(keys), [])
        needed = max(1, len(transfer.keys or ()))
        run, good = 0, set()
        for length, held in enumerate(there, 1):
            run = run + 1 if held else 0
            if run >= min(needed, length):
                good.add(length)
        return good

    def _transfer(
        self,
        transfers: Sequence[PoolTransfer],
        move: Callable[[str, Sequence[str], torch.Tensor], int],
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            name, keys = str(transfer.name), transfer.keys or []
            moved = 0
            if name in self._pools and transfer.host_indices is not None:
                moved = move(name, keys, transfer.host_indices)
            results[transfer.name] = leading(moved, keys)
        return results

    # -- pages as tensors ----------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copy one page of attention to a tensor, by default a new one; None if there is none."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copy the leading pages that there are to tensors; None for each of the others."""
        pool = self._pools[KV]
        if target_locations is None:
            target_locations = [torch.empty(pool.page_bytes, dtype=torch.uint8) for _ in keys]
        targets = list(target_locations)
        pieces = pool.read_into(keys, targets)
        filled = self._moved(READ, pool, lambda valid: self._counted(READ, pieces))
        return [target if at < filled else None for at, target in enumerate(targets)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page of attention; whether the store has it now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages of attention; whether the store has all of them now."""
        pool, timeout = self._pools[KV], min(self._config.max_wait_s, BATCH_SECONDS)

        def put(valid: Callable[[], bool]) -> int:
            with self._storing:
                if not valid():
                    return 0
                return pool.store.put(keys_of(keys), values, timeout=timeout)

        stored = self._moved(STORED, pool, lambda valid: self._tried(STORED, lambda: put(valid), 0))
        return stored == len(keys)

    # -- the whole -----------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget everything, on every tier; True once that is done.

        What is read or stored meanwhile is told as not done, and nothing of it is kept.

        Raises:
            KVStoreError: if it is not done within ``max_wait_s`` after the last store. SGLang
                would not look at a result.
        """
        faults: list[Exception] = []
        with self._turn:
            self._clears += 1
            try:
                with self._storing:
                    end = time.monotonic() + self._config.max_wait_s
                    # All of them, whatever becomes of the first: their pages belong together.
                    for pool in self._pools.values():
                        try:
                            pool.store.reset(max(LEAST_SECONDS, end - time.monotonic()))
                        except Exception as error:
                            faults.append(error)
            finally:
                self._clears += 1
        if faults:
            raise KVStoreError(f"pages are not cleared: {faults[0]}") from faults[0]
        return True

    def get_stats(self) -> Any:
        """Return pages and GB/s of the transfers since the last call, for SGLang's metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        moves, self._moves = self._moves, {READ: Moves(), STORED: Moves()}
        read, stored = moves[READ], moves[STORED]
        return StorageMetrics(read.pages, stored.pages, read.gbps, stored.gbps)

    def close(self) -> None:
        """Close the stores in order: what is on its way to a tier is waited for."""
        self._open = False
        with contextlib.ExitStack() as all_of_them:
            for pool in self._pools.values():
                all_of_them.callback(pool.close)

    def _read(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> int:
        pool = self._pools[name]
        pieces = pool.read(keys, indices)
        return self._moved(READ, pool, lambda valid: self._counted(READ, pieces))

    def _write(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> int:
        pool, timeout = self._pools[name], self._config.max_wait_s

        def write(valid: Callable[[], bool]) -> int:
            pieces = pool.write(keys, indices, timeout, self._storing, valid)
            return self._counted(STORED, pieces)

        return self._moved(STORED, pool, write)

    def _moved(self, what: str, pool: Pool, move: Callable[[Callable[[], bool]], int]) -> int:
        """The pages that `move`, which may ask for it, moves; none if a clearing is asked for."""
        begun, clears = time.perf_counter(), self._clears

        def valid() -> bool:
            return self._clears == clears and not clears % 2

        moved = move(valid)
        moved = moved if valid() else 0
        self._moves[what].note(moved, pool.page_bytes, time.perf_counter() - begun)
        return moved

    def _counted(self, what: str, pieces: Iterator[int]) -> int:
        """How many pages were moved before the end or a fault."""
        moved: list[int] = []
        self._tried(what, lambda: moved.extend(pieces), None)
        return sum(moved)

    def _tried(self, what: str, call: Callable[[], _T], otherwise: _T) -> _T:
        """The result of a call; a fault is a miss."""
        fault = f"kvstore: pages are not {what}"
        try:
            result = call()
        except Exception as error:  # Of a policy or a hook, too: SGLang takes none.
            self._complaints.failed(fault, str(error) or repr(error), time.monotonic())
            return otherwise
        self._complaints.went_well(fault, f"kvstore: pages are {what} again", time.monotonic())
        return result


def _divided(tier: DiskConfig | TierConfig, share: float) -> DiskConfig | TierConfig:
    """This share of a tier; the size of a disk's segments follows, unless the operator gave it."""
    if isinstance(tier, DiskConfig):
        return attrs.evolve(tier, capacity_bytes=int(tier.capacity_bytes * share))
    whole = tier.parameters.get("capacity_bytes")
    if not whole:
        return tier
    part = {"capacity_bytes": int(parse_size(whole) * share)}
    return attrs.evolve(tier, parameters={**tier.parameters, **part})
