"""Loads: the device reads chunks from host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from kvstore.core.chunk import LEAVING, READY, Chunk
from kvstore.core.host import HostPool
from kvstore.core.request import Requests
from kvstore.core.usage import Chains, Uses
from kvstore.core.wait_queue import WaitQueue

__all__ = ["Loads"]


class Loads:
    """Pins chunks for loads, and takes the pins back.

    Attributes:
        loaded: chunks whose load was prepared. loaded_from: the same by number of the tier
            from which they came to host memory, -1 for none.
        saved: seconds of computing that these loads made unnecessary, by the same numbers, as far
            as `price` was told how long computing takes.
        by_tenant: `loaded` by tenant, where there are some.
        stray: keys that were reported but were not being loaded.
    """

    def __init__(
        self, pool: HostPool, requests: Requests, queue: WaitQueue, chains: Chains, uses: Uses
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._queue = queue
        self._chains = chains
        self._uses = uses
        self.loaded = 0
        self.loaded_from: Counter[int] = Counter()
        self.saved: dict[int, float] = {}
        self._priced: Counter[int] = Counter()
        # Being loaded for the request for which they were read: further loads are from host memory.
        self._read: set[bytes] = set()
        self.by_tenant: Counter[str] = Counter()
        self.stray = 0

    def prepare(self, keys: Collection[bytes], request_id: str) -> list[int]:
        """Pin `keys`, which answered "hit" in this step; returns their rows.

        Raises:
            KeyError: if one of them cannot be loaded; then nothing was pinned.
        """
        pool = self._pool
        chunks: list[Chunk] = []
        for key in keys:
            chunk = pool.chunks.get(key)
            if chunk is None or chunk.state < READY:
                raise KeyError(f"block {key.hex()} is not loadable; look it up in the same step")
            chunks.append(chunk)
        request = self._requests.open(request_id)
        if request.queued:
            request.leave_queue()
        if self._chains.filters and request.keys:
            self._chains.count(request, request.keys)
        self._chains.extend(request, list(keys))
        loading, leases = request.loading, request.leases
        wanted = list(dict.fromkeys(chunks))
        unleased: list[Chunk] = []
        for chunk in wanted:
            key = chunk.key
            if key in leases:
                # The pin of its lease becomes that of the load.
                del leases[key]
            else:
                unleased.append(chunk)
                if chunk.state >= LEAVING:
                    pool.stay(chunk)
            loading[key] = loading.get(key, 0) + 1
        pool.pin(unleased)
        read = self._read
        used = [chunk.key for chunk in wanted if chunk.origin < 0 or chunk.key in read]
        if used:
            self.loaded_from[-1] += len(used)
        if len(used) < len(wanted):
            first = [chunk for chunk in wanted if chunk.origin >= 0 and chunk.key not in read]
            self.loaded_from.update(chunk.origin for chunk in first)
            read.update(chunk.key for chunk in first)
        self.loaded += len(chunks)
        if pool.policy.shared:
            self.by_tenant.update(map(pool.policy.tenant_of, keys))
        self._queue.remove(request)
        # For chunks that were promoted for this load, the promotion was the use.
        self._uses.loaded(request, used, list(keys))
        return [chunk.row for chunk in chunks]

    def complete(self, keys: Collection[bytes], request_id: str, now: float) -> None:
        """Take back the pins of `prepare`, as the device has read the rows."""
        request = self._requests.get(request_id)
        loading = request.loading if request is not None else {}
        loaded: list[Chunk] = []
        for key in dict.fromkeys(keys):
            pins = loading.pop(key, 0)
            if not pins:
                self.stray += 1
                continue
            if pins > 1:
                loading[key] = pins - 1
            chunk = self._pool.chunks[key]
            chunk.loaded()
            self._read.discard(key)
            loaded.append(chunk)
        if loaded:
            self._pool.unpin(loaded)
            self._queue.rows_moved([loaded[-1].key], now)
        if request is not None:
            self._requests.drop_if_idle(request)

    def price(self, pace: float) -> None:
        """Add to `saved` what the loads since the last call saved, at `pace` seconds a chunk.

        While the pace is not known, 0, loads are left for a later call.
        """
        if not pace:
            return
        for origin, count in self.loaded_from.items():
            more = count - self._priced[origin]
            self.saved[origin] = self.saved.get(origin, 0.0) + more * pace
        self._priced = self.loaded_from.copy()

    def reset(self) -> None:
        """Forget for whom chunks were read."""
        self._read.clear()

    def under_way(self) -> Iterable[tuple[str, bytes, int]]:
        """Yield request, key and row of every chunk that is being loaded, once for each pin."""
        chunks = self._pool.chunks
        for request in self._requests.values():
            for key, pins in request.loading.items():
                for _ in range(pins):
                    yield request.id, key, chunks[key].row
