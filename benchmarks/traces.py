"""Reads traces of prefix-hashed requests, and replays them through an eviction policy alone.

The rules of `replay` are those of the study in docs/policies.md: one tier of a
fixed number of blocks, cold start, requests in the order of the file and one
after another. The hits of a request are its longest resident prefix, counted
before anything changes. Then what is resident is touched and what is absent is
inserted, each tail first, with one eviction per block that needs room.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvstore.policies import EvictionPolicy

__all__ = ["TRACES", "Replayed", "Request", "blocks_in", "key_of", "read_trace", "replay", "unique"]

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its time in milliseconds, its lengths in tokens, its blocks, head first."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _open(path: Path) -> TextIO:
    return lzma.open(path, "rt") if path.suffix == ".xz" else path.open()


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a file in the Mooncake form or the packed form, plain or ``.xz``.

    Raises:
        ValueError: naming the line that is neither.
    """
    earlier: list[list[int]] = []
    fresh = 0
    packed = False
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                told: Any = json.loads(line)
                if isinstance(told, list):
                    if not packed:
                        raise ValueError("a packed trace begins with its header")
                    ms, tokens_in, tokens_out, ref, keep, new = told
                    ids = earlier[ref][:keep] if keep else []
                    ids = ids + list(range(fresh, fresh + new))
                    fresh += new
                    earlier.append(ids)
                    yield Request(ms, tokens_in, tokens_out, ids)
                elif number == 1 and "hash_ids" not in told:
                    packed = "block_tokens" in told
                else:
                    yield Request(
                        told["timestamp"],
                        told["input_length"],
                        told["output_length"],
                        told["hash_ids"],
                    )
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a request ({error!r})") from error


def key_of(block: int) -> bytes:
    """The key of a block: well mixed bytes, as block hashes are, and a group index."""
    mixed = (block + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
    return mixed.to_bytes(16, "big") + b"\0\0\0\0"


def keyed(requests: Iterable[Request]) -> list[list[bytes]]:
    """The blocks of each request as keys; equal keys are one object."""
    known: dict[int, bytes] = {}
    result = []
    for request in requests:
        keys = []
        for block in request.hash_ids:
            key = known.get(block)
            if key is None:
                key = known[block] = key_of(block)
            keys.append(key)
        result.append(keys)
    return result


def blocks_in(requests: Sequence[Sequence[bytes]]) -> int:
    """The number of blocks asked for."""
    return sum(map(len, requests))


def unique(requests: Sequence[Sequence[bytes]]) -> int:
    """The number of different blocks."""
    return len({key for keys in requests for key in keys})


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay counted, in blocks."""

    blocks: int
    hits: int
    inserts: int

    @property
    def ratio(self) -> float:
        """Hits in percent of the blocks asked for."""
        return 100 * self.hits / self.blocks


def _nobody(key: bytes) -> bool:
    return False


def replay(policy: EvictionPolicy, requests: Iterable[Sequence[bytes]]) -> Replayed:
    """Play keyed requests through a policy, by the rules above."""
    capacity = policy.capacity
    blocks = hits = inserts = size = 0
    resident: set[bytes] = set()
    touch, insert, evict = policy.touch, policy.insert, policy.evict
    for keys in requests:
        blocks += len(keys)
        policy.link(keys)
        for key in keys:
            if key not in resident:
                break
            hits += 1
        tail_first = keys[::-1]
        for key in tail_first:
            if key in resident:
                touch(key)
        for key in tail_first:
            # Also what room for its own tail has cost this request.
            if key not in resident:
                inserts += 1
                if size < capacity:
                    size += 1
                else:
                    victims = evict(1, _nobody, (key,))
                    assert victims is not None
                    resident.discard(victims[0])
                insert(key)
                resident.add(key)
        policy.settle(keys)
    return Replayed(blocks, hits, inserts)
