"""Requests per second of an asyncio server over the store, by how it asks for its prompts.

    python benchmarks/server.py FOLDER

Many users at once ask for prompts of which host memory holds a few, the disk the
rest, and nobody the last two chunks. Three ways to ask take turns in one store, each
with and without names of requests: `get` alone; `resolve`, then `get` of what was
found; `lookup_prefix` again and again, then `get`. What counts is the ratio to `get`
alone in the same run. With `--spans` the question is what spans cost: `get` over two such
stores in turns, one of which tells OpenTelemetry's SDK of everything.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dry import read_options
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import kvstore
from kvstore.api.store import Store

Ask = Callable[[Store, list[bytes], str | None], Awaitable[int]]

POLL_SECONDS = 0.001


async def get(store: Store, keys: list[bytes], name: str | None) -> int:
    """The chunks that can be had."""
    async with store.get(keys, name) as chunks:
        # The copy to the device.
        await asyncio.sleep(0)
        return len(chunks)


async def resolve(store: Store, keys: list[bytes], name: str | None) -> int:
    """The number first."""
    return await get(store, keys[: await store.resolve(keys, name)], name)


async def poll(store: Store, keys: list[bytes], name: str | None) -> int:
    """The number first, as a scheduler asks."""
    while (found := store.lookup_prefix(keys, name)) is None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    return await get(store, keys[:found], name)


WAYS: dict[str, Ask] = {"get": get, "resolve + get": resolve, "lookup_prefix + get": poll}


async def measure(
    store: Store, ask: Ask, prompts: list[list[bytes]], users: int, seconds: float, *, named: bool
) -> tuple[float, float]:
    """Requests per second, and the fraction of the chunks that was there."""
    end = time.monotonic() + seconds
    numbers = itertools.count()
    requests = asked = found = 0

    async def user(seed: int) -> None:
        nonlocal requests, asked, found
        rng = random.Random(seed)
        while time.monotonic() < end:
            # The end of a prompt is new each time.
            keys = [*rng.choice(prompts), rng.randbytes(32), rng.randbytes(32)]
            name = f"request {next(numbers)}" if named else None
            count = await ask(store, keys, name)
            requests += 1
            found += count
            asked += len(keys)
            if name is not None:
                store.release(name)

    start = time.monotonic()
    await asyncio.gather(*(user(seed) for seed in range(users)))
    taken = time.monotonic() - start
    return requests / taken, found / asked


def prompts_of(options: argparse.Namespace) -> list[list[bytes]]:
    """The keys of each prompt."""
    return [
        [hashlib.sha256(f"{n}/{depth}".encode()).digest() for depth in range(options.length)]
        for n in range(options.prompts)
    ]


def config_of(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A store with room for a part in host memory, and for all on disk."""
    size = options.chunk_kib * 1024
    total = options.prompts * options.length
    return {
        "chunk_bytes": size,
        "identity": {"model": "benchmark"},
        "cpu_bytes_to_use": int(total * options.host) * size,
        "tiers": [{"type": "disk", "path": folder, "capacity_bytes": 2 * total * size + 2**28}],
    }


async def fill(store: Store, prompts: list[list[bytes]]) -> None:
    """Put all of them, and wait until they are on disk."""
    data = bytes(store.chunk_bytes)
    for keys in prompts:
        await store.put(keys, [data] * len(keys))
    await store.flush()


async def run(options: argparse.Namespace, folder: str) -> None:
    """Fill a store, then let the ways take turns."""
    prompts = prompts_of(options)
    rates: dict[tuple[str, bool], list[float]] = {}
    hits: dict[tuple[str, bool], list[float]] = {}
    async with kvstore.open(config_of(options, folder)) as store:
        await fill(store, prompts)
        for _, named, (way, ask) in itertools.product(
            range(options.rounds), (False, True), WAYS.items()
        ):
            rate, ratio = await measure(
                store, ask, prompts, options.users, options.seconds, named=named
            )
            rates.setdefault((way, named), []).append(rate)
            hits.setdefault((way, named), []).append(ratio)
    for (way, named), each in rates.items():
        rate, base = statistics.median(each), statistics.median(rates["get", named])
        row = {
            "way": way,
            "named": named,
            "requests_per_s": round(rate, 1),
            "ratio_to_get": round(rate / base, 3),
            "hit_ratio": round(statistics.median(hits[way, named]), 4),
        }
        print(json.dumps(row), flush=True)


class Counting(SpanExporter):
    """Takes spans and drops them.

    Attributes:
        spans: how many came.
    """

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


async def run_spans(options: argparse.Namespace, folder: str) -> None:
    """Two stores, with and without spans, take turns."""
    exporter = Counting()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    prompts = prompts_of(options)
    rates: dict[bool, list[float]] = {False: [], True: []}
    seconds = 0.0
    async with AsyncExitStack() as stack:
        stores: dict[bool, Store] = {}
        for spans in rates:
            config = {**config_of(options, f"{folder}/{spans}"), "spans": spans}
            stores[spans] = await stack.enter_async_context(kvstore.open(config))
            await fill(stores[spans], prompts)
        provider.force_flush()
        before = exporter.spans
        for number in range(2 * options.rounds):
            spans = bool(number % 2)
            rate, _ = await measure(
                stores[spans], get, prompts, options.users, options.seconds, named=True
            )
            rates[spans].append(rate)
            seconds += options.seconds * spans
        provider.force_flush()
        made = exporter.spans - before
    ratios = [on / off for off, on in zip(rates[False], rates[True], strict=True)]
    row = {
        "requests_per_s": round(statistics.median(rates[False]), 1),
        "with_spans": round(statistics.median(rates[True]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in sorted(ratios)],
        "spans_per_s": round(made / seconds),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="where the disk tier goes; a temporary folder")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=40, help="chunks of a prompt")
    parser.add_argument("--chunk-kib", type=int, default=64)
    parser.add_argument("--host", type=float, default=0.1, help="part that host memory holds")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spans", action="store_true", help="what spans cost")
    options = read_options(parser, users=2, prompts=4, length=4, seconds=0.05, rounds=1)
    with tempfile.TemporaryDirectory(prefix="kvstore-", dir=options.folder) as folder:
        asyncio.run((run_spans if options.spans else run)(options, folder))


if __name__ == "__main__":
    main()
