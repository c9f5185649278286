"""What each eviction policy hits, and what it costs.

    python benchmarks/eviction.py hits --trace conversation --percent 1,5,10,25
    python benchmarks/eviction.py hits --trace agent-thinned,conversation-and-chat
    python benchmarks/eviction.py cost --keys 1000000

Prints one JSON row per case. `hits` replays a trace through host memory alone, as
`kvstore simulate` does. `cost` compares with a plain `OrderedDict` used as an
LRU, in the same run: nanoseconds of processor time for each block of a chain of 100 that is used
(`hit_ns`) or takes the place of another (`miss_ns`), links and ends of requests
included, and bytes per resident key, ghosts included. The key itself is the
caller's where it is resident, and counts where only the policy holds it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.dry import read_options
from benchmarks.interleave import merged, shuffled, thinned
from kvstore.plugins import Choice
from kvstore.policies import EvictionPolicy, Protected, create_policy
from kvstore.simulation import Setup, Trace, read_trace, replay
from kvstore.testing.policy import nobody

POLICIES = ("lru", "fifo", "sieve", "s3-fifo", "arc", "hit-density")
CHAIN = 100
TRACES = Path(__file__).parent / "traces"

FILES = {
    "conversation": "mooncake_conversation.jsonl.xz",
    "agent": "agent_sessions.packed.xz",
    "chat": "chat_generated.packed.xz",
}


def trace(name: str, limit: int | None = None) -> Trace:
    """The first `limit` requests of a trace: one of `FILES`, or one made from them, `MADE`."""
    if name in FILES:
        return read_trace(TRACES / FILES[name], limit=limit)
    if name not in MADE:
        raise SystemExit(f"unknown trace {name!r}; known are: {', '.join((*FILES, *MADE))}")
    made = MADE[name]()
    return Trace.of(name, islice(zip(made.times, made.requests, strict=True), limit))


MADE: dict[str, Callable[[], Trace]] = {
    "conversation-shuffled": lambda: shuffled(trace("conversation"), 1),
    "conversation-thinned": lambda: thinned(trace("conversation"), 0.5, 2),
    "chat-thinned": lambda: thinned(trace("chat"), 0.4, 3),
    "agent-thinned": lambda: thinned(shuffled(trace("agent"), 7), 0.08, 4),
    "agent-few": lambda: thinned(trace("agent"), 0.08, 5),
    "conversation-and-agent": lambda: merged(
        thinned(trace("conversation"), 0.6, 6), trace("agent-thinned")
    ),
    "conversation-and-chat": lambda: merged(
        shuffled(trace("conversation-thinned"), 9), trace("chat-thinned")
    ),
}


def hits(
    name: str, percents: Sequence[float], policies: Sequence[str], limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """One row for each policy and size, over the first `limit` requests where given."""
    requests = trace(name, limit)
    for percent in percents:
        capacity = max(1, int(requests.unique * percent / 100))
        for policy in policies:
            told = replay(requests, Setup(capacity, host_policy=Choice.parse(policy)))
            yield {
                "trace": name,
                "percent": percent,
                "capacity": capacity,
                "policy": policy,
                "hits": told.hits,
                "inserts": told.host_writes,
                "hit_percent": round(100 * told.hit_ratio, 2),
                "us_per_chunk": round(told.seconds / told.accesses * 1e6, 2),
            }


class Plain(EvictionPolicy):
    """The yardstick: an `OrderedDict` and nothing else."""

    name = "OrderedDict"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.touch = self._keys.move_to_end  # type: ignore[method-assign]

    def insert(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        raise NotImplementedError

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return [self._keys.popitem(last=False)[0] for _ in range(count)]

    def clear(self) -> None:
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


def key_of(number: int) -> bytes:
    """A key: well mixed bytes, as block hashes are, and a group index."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
    return mixed.to_bytes(16, "big") + b"\0\0\0\0"


def _chain(number: int) -> list[bytes]:
    return [key_of(number * CHAIN + depth) for depth in range(CHAIN)]


def _use(policy: EvictionPolicy, chain: Sequence[bytes]) -> None:
    policy.link(chain)
    for key in reversed(chain):
        policy.touch(key)
    policy.settle(chain)


def _enter(policy: EvictionPolicy, chain: Sequence[bytes], capacity: int) -> None:
    policy.link(chain)
    for key in reversed(chain):
        if len(policy) >= capacity:
            policy.evict(1, nobody, (key,))
        policy.insert(key)
    policy.settle(chain)


def _made(name: str, capacity: int) -> EvictionPolicy:
    return Plain(capacity) if name == Plain.name else create_policy(name, capacity)


def _bytes_per_key(name: str, keys: int) -> float:
    """After four times as many keys as fit have entered, every second chain used again."""
    gc.collect()
    tracemalloc.start()
    policy = _made(name, keys)
    for number in range(4 * keys // CHAIN):
        _enter(policy, _chain(number), keys)
        if number % 2:
            _use(policy, [key for key in _chain(number) if key in policy])
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(policy) - sys.getsizeof(key_of(0))


def _times(name: str, keys: int, rounds: int) -> tuple[float, float]:
    """Nanoseconds per block that hits and that misses: the best of the rounds for each."""
    policy = _made(name, keys)
    chains = [_chain(number) for number in range(keys // CHAIN)]
    for chain in chains:
        _enter(policy, chain, keys)
    rng = random.Random(1)
    next_chain = len(chains)
    hit: list[float] = []
    miss: list[float] = []
    for _ in range(rounds):
        whole = [chain for chain in chains if all(key in policy for key in chain)]
        used = rng.sample(whole, min(len(whole), max(1, keys // CHAIN // 20)))
        began = time.process_time()
        for chain in used:
            _use(policy, chain)
        hit.append((time.process_time() - began) / (len(used) * CHAIN))
        new = [_chain(next_chain + number) for number in range(max(1, keys // CHAIN // 20))]
        next_chain += len(new)
        began = time.process_time()
        for chain in new:
            _enter(policy, chain, keys)
        miss.append((time.process_time() - began) / (len(new) * CHAIN))
        chains += new
    return min(hit) * 1e9, min(miss) * 1e9


def cost(keys: int, rounds: int, policies: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for each policy, the yardstick first."""
    base: dict[str, float] = {}
    for name in (Plain.name, *policies):
        hit, miss = _times(name, keys, rounds)
        row = {"hit_ns": hit, "miss_ns": miss, "bytes_per_key": _bytes_per_key(name, keys)}
        base = base or row
        yield {
            "policy": name,
            "keys": keys,
            **{what: round(value) for what, value in row.items()},
            **{f"{what}_ratio": round(value / base[what], 2) for what, value in row.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["hits", "cost"])
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--percent", default="1,5,10,25")
    parser.add_argument("--limit", type=int, help="the first requests of each trace only")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    told = read_options(parser, policies="lru,arc", keys=1000, rounds=1, percent="5", limit=200)
    policies = told.policies.split(",")
    rows: Iterable[dict[str, Any]]
    if told.what == "hits":
        percents = [float(each) for each in told.percent.split(",")]
        traces = told.trace.split(",")
        rows = (row for name in traces for row in hits(name, percents, policies, told.limit))
    else:
        rows = cost(told.keys, told.rounds, policies)
    try:
        for row in rows:
            print(json.dumps(row), flush=True)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
