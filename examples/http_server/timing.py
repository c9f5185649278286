"""Time to first token: recomputed, from host memory, and from disk after a restart.

    python -m examples.http_server.timing --tokens 1500 --layers 8 --hidden 512

Three servers, one after the other: one without a cache, one that stores the
prompts and then has them in host memory, and one more over the same disk.
Prints a markdown table; every completion is compared with the first server's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.http_server.process import ServerProcess

WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one request."""

    seconds: float
    """To the first token."""

    tokens: list[int]
    cached: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: the same prompts, served in one way."""

    name: str
    answers: list[Answer]


def ask(client: httpx.Client, prompt: list[int], max_tokens: int) -> Answer:
    """Send one prompt and read the stream to its end."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    first, cached, tokens = 0.0, 0, []
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            first = first or time.perf_counter()
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                tokens += choice["token_ids"]
            if "usage" in event:
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(first - began, tokens, cached)


def rounds(
    folder: Path, options: list[str], prompts: list[list[int]], max_tokens: int, names: list[str]
) -> list[Row]:
    """Start a server and ask it for all `prompts` once for each name."""
    with ServerProcess(folder / "server.log", *options) as server:
        client = httpx.Client(base_url=server.url(), timeout=WAIT_SECONDS)
        with client:
            # The first passes of a process are slow. This prompt has no full chunk, and
            # leaves nothing behind.
            for _ in range(3):
                ask(client, [0] * 32, 2)
            rows = []
            for name in names:
                rows.append(Row(name, [ask(client, prompt, max_tokens) for prompt in prompts]))
                _settle(client)
        return rows


def table(rows: list[Row]) -> str:
    """`rows` as markdown, each compared with the first."""
    lines = [
        "| | time to first token | | cached tokens | completions |",
        "|---|---|---|---|---|",
    ]
    base = statistics.median(answer.seconds for answer in rows[0].answers)
    for row in rows:
        seconds = statistics.median(answer.seconds for answer in row.answers)
        cached = statistics.median(answer.cached for answer in row.answers)
        told = "equal" if _equal(row, rows[0]) else "DIFFERENT"
        if row is rows[0]:
            told = "the reference"
        lines.append(
            f"| {row.name} | {seconds * 1000:.0f} ms | {base / seconds:.1f}x "
            f"| {cached:.0f} | {told} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the servers and print the table; 1 when a completion differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each completion")
    parser.add_argument("--cpu-bytes", default="1GiB")
    parser.add_argument("--disk", type=Path, help="folder for the cache; a temporary one")
    parser.add_argument("--disk-bytes", default="4GiB")
    given, model = parser.parse_known_args()
    source = random.Random(0)
    prompts = [list(source.randbytes(given.tokens)) for _ in range(given.prompts)]
    with tempfile.TemporaryDirectory(prefix="kvstore-timing-", dir=given.disk) as scratch:
        folder = Path(scratch)
        cache = ["--cpu-bytes", given.cpu_bytes]
        cache += ["--disk", str(folder / "cache"), "--disk-bytes", given.disk_bytes]
        rows = []
        for options, names in (
            (["--no-cache"], ["recomputed, without a cache"]),
            (cache, ["recomputed and stored", "from host memory"]),
            (cache, ["from disk, after a restart"]),
        ):
            rows += rounds(folder, [*options, *model], prompts, given.max_tokens, names)
    print(table(rows))
    return 0 if all(_equal(row, rows[0]) for row in rows) else 1


def _equal(row: Row, other: Row) -> bool:
    return [answer.tokens for answer in row.answers] == [answer.tokens for answer in other.answers]


def _settle(client: httpx.Client) -> None:
    """Wait until what the answers left to save is on disk: it is no part of the next round."""
    end = time.monotonic() + WAIT_SECONDS
    idle = {"http_server_saving 0.0", "kvstore_host_busy_ratio 0.0"}
    while time.monotonic() < end:
        lines = client.get("/metrics").text.splitlines()
        cached = any(line.startswith("kvstore_") for line in lines)
        if idle <= {*lines} or not cached:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
