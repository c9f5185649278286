"""What one scheduler step costs inside kvstore, for every policy and flow.

    python benchmarks/step.py
    python benchmarks/step.py --chunks 1000000 --policies lru,hit-density
    python benchmarks/step.py --against HEAD~5      # before and after, case by case, in one run
    python benchmarks/step.py --neighbour 1000000   # beside a lane of others: neighbour.py
    python benchmarks/step.py --tenants 4           # prompts of tenants, each with its share

The core is driven as vLLM's manager drives it, call by call in the order of vLLM 0.32: lookups
of every waiting request, `prepare_load`, `on_schedule_end`, `prepare_store`,
`on_request_finished`, and, when the model has run, `complete_load` and `complete_store`. The
server, the device and the disk are imagined: a disk serves `RATE` chunks a second in each
direction after `LATENCY`, and nothing is read or written.

The load: 20,000 rows, 100,000 chunks on a full disk, and 64 requests of 500 chunks that wait, so
that rows are what everybody waits for and stores find none; in every other stretch of 200 steps
16 wait, and stores find room. Of the requests 60 % ask for a prompt that the disk held at the
start, 20 % for the head of such a prompt with a new end, 20 % for a new prompt. A step takes
20 ms; whoever is answered goes at once to the device, where 128 chunks are computed in a step. At
most `ARRIVALS` requests arrive in one step, but at the start, when all 64 come in one, which is
told apart: `start_ms` is the worst of the first steps.

A step is the time inside kvstore from one run of the model to the next, the loop in which vLLM
scans the keys included. The garbage collector works as it does in vLLM, which freezes what there
is when it has started; its pauses count. All is decided by numbers from one seed and by imagined
time, so that every round does the same in each step: with `--rounds` the fastest of each step
counts, which leaves out what neighbours on the machine have taken. Prints one JSON row for each
case, then a table.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dry import read_options
from neighbour import Neighbour, phases
from revision import ROOT, checked_out

from kvstore.core import Core, Flow, HostPool, OwnedTier, PeerTier
from kvstore.plugins import build_policy
from kvstore.policies.shares import Share, Shares, tenant_keys
from kvstore.types import Completion, Move, Op, RecoveredTier

POLICIES = ("lru", "fifo", "arc", "sieve", "s3-fifo", "hit-density")
FLOWS = ("write-through", "demote", "exclusive")
CALLS = ("poll", "lookup", "prepare_load", "schedule_end", "prepare_store", "complete")

STEP_SECONDS = 0.02
LATENCY = 0.0005
RATE = 10_000.0
"""Chunks a second that the disk reads, and as many that it writes: 2.6 GB/s of 256 KiB."""
ARRIVALS = 2
PORTION = 128
"""Chunks that the device computes in one step: 2,048 tokens in blocks of 16."""
LOAD_STEPS = 2
"""Steps that a load to the device takes."""
TIDE, TIDE_STEPS = 4, 200
"""In every other stretch of so many steps a fourth as many requests wait, and stores find room."""
START = 64
"""Steps that belong to the start."""
SEGMENT = 4096


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest() + b"\0\0\0\0"


def keys_of(args: argparse.Namespace, prompt: int, numbers: Iterable[int]) -> list[bytes]:
    """The keys of a prompt: those of one tenant, where there are any."""
    keys = map(key_of, numbers)
    return tenant_keys(f"tenant-{prompt % args.tenants}", keys) if args.tenants else list(keys)


class Disk:
    """Ends moves in order, each kind at `RATE`."""

    def __init__(self) -> None:
        self.free = {Op.PROMOTE: 0.0, Op.CASCADE: 0.0}
        self.under_way: deque[tuple[float, Move]] = deque()
        self.moved = 0

    def start(self, moves: Sequence[Move], now: float) -> None:
        for move in moves:
            begins = max(now, self.free.get(move.op, 0.0))
            ends = begins + len(move.keys) / RATE
            self.free[move.op] = ends
            self.under_way.append((ends + LATENCY, move))
            self.moved += len(move.keys)

    def take(self, now: float) -> list[Completion]:
        ended = [move for ends, move in self.under_way if ends <= now]
        self.under_way = deque(pair for pair in self.under_way if pair[0] > now)
        return [Completion(move.id, [True] * len(move.keys)) for move in ended]


@dataclass
class Prompt:
    """One request of the imagined server."""

    name: str
    keys: list[bytes]
    loaded: int = 0
    stored: int = 0
    ready_at: int = 0
    stores: list[list[bytes]] = field(default_factory=list)


class Server:
    """vLLM's scheduler and manager, as far as the core notices them."""

    def __init__(
        self,
        core: Core,
        args: argparse.Namespace,
        seed: int,
        news: Callable[[], list[Completion]] = list,
    ) -> None:
        self.core = core
        self.news = news
        self.args = args
        self.disk = Disk()
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.step_number = 0
        self.in_step = False
        self.retried: set[str] = set()
        self.waiting: list[Prompt] = []
        self.loading: list[Prompt] = []
        self.computing: list[Prompt] = []
        self.leaving: list[Prompt] = []
        self.storing: list[tuple[Prompt, list[bytes]]] = []
        self.finished = 0
        self.hits = 0
        self.asked = 0
        self.stores_deferred = 0
        self.spent: dict[str, float] = defaultdict(float)
        self.clock: Callable[[], float] = (
            time.thread_time if args.clock == "cpu" else time.perf_counter
        )
        self._names = 0
        self._fresh = args.chunks
        self._known = args.chunks // args.keys

    # -- what the manager does ---------------------------------------------------------------

    def begin_step(self) -> None:
        self.in_step = True
        taken = [*self.disk.take(self.now), *self.news()]
        began = self.clock()
        self.core.poll(self.now, taken)
        self.spent["poll"] += self.clock() - began

    def hand_over(self, call: str) -> None:
        began = self.clock()
        moves = self.core.flush(self.now)
        self.spent[call] += self.clock() - began
        self.disk.start(moves, self.now)

    def lookup(self, key: bytes, name: str) -> str:
        answer = self.core.lookup(key, name)
        if answer:
            return "hit"
        if answer is not None:
            return "miss"
        if not self.core.is_waiting(name):
            return "pending"
        if name in self.retried:
            return "miss"
        self.retried.add(name)
        return "retry"

    # -- what the scheduler does ---------------------------------------------------------------

    def scan(self, prompt: Prompt) -> int | None:
        """As `_maximal_prefix_lookup` of vLLM."""
        hits, deferred = 0, False
        lookup, name = self.lookup, prompt.name
        for key in prompt.keys:
            answer = lookup(key, name)
            if answer == "hit":
                hits += 1
            elif answer == "pending":
                deferred = True
                hits += 1
            elif answer == "retry":
                deferred = True
            else:
                break
        return None if deferred else hits

    def arrive(self, most: int) -> None:
        ebb = self.step_number // TIDE_STEPS % 2
        most_waiting = self.args.waiting // (TIDE if ebb else 1)
        while most and len(self.waiting) < most_waiting:
            most -= 1
            size, roll = self.args.keys, self.rng.random()
            known = self.rng.randrange(self._known)
            old = known * size
            kept = size if roll < 0.6 else size // 2 if roll < 0.8 else 0
            numbers = [*range(old, old + kept), *range(self._fresh, self._fresh + size - kept)]
            self._fresh += size - kept
            self._names += 1
            prompt = Prompt(f"request-{self._names}", keys_of(self.args, known, numbers))
            self.core.on_new_request(prompt.name)
            self.waiting.append(prompt)

    def step(self) -> None:
        core, clock, spent = self.core, self.clock, self.spent
        self.arrive(self.args.waiting if not self.step_number else self.args.arrivals)
        self.begin_step()
        still: list[Prompt] = []
        for prompt in self.waiting:
            began = clock()
            hits = self.scan(prompt)
            spent["lookup"] += clock() - began
            if hits is None:
                still.append(prompt)
                continue
            self.asked += len(prompt.keys)
            self.hits += hits
            prompt.loaded = prompt.stored = hits
            if hits:
                began = clock()
                core.prepare_load(prompt.keys[:hits], prompt.name)
                spent["prepare_load"] += clock() - began
                prompt.ready_at = self.step_number + LOAD_STEPS
                self.loading.append(prompt)
            else:
                self.computing.append(prompt)
        self.waiting = still
        self.hand_over("schedule_end")
        self.in_step = False
        self.retried.clear()
        stored = self.store()
        for prompt in self.leaving:
            began = clock()
            core.on_request_finished(prompt.name)
            spent["prepare_store"] += clock() - began
            self.finished += 1
        self.leaving = stored
        # The model runs; then its transfers are reported, and the next step begins.
        self.step_number += 1
        self.now += STEP_SECONDS
        self.complete()

    def store(self) -> list[Prompt]:
        """The requests that are computed say what they have made; returns those that are done."""
        portion, done = self.args.portion, []
        for prompt in list(self.computing):
            if not portion:
                break
            count = min(portion, len(prompt.keys) - prompt.loaded)
            prompt.loaded += count
            portion -= count
            keys = prompt.keys[prompt.stored : prompt.loaded]
            if keys:
                taken = self.disk.take(self.now)
                began = self.clock()
                self.core.absorb(taken)
                grant = self.core.prepare_store(keys, prompt.name)
                self.spent["prepare_store"] += self.clock() - began
                if grant is None:
                    self.stores_deferred += 1
                else:
                    prompt.stored = prompt.loaded
                    if grant.keys:
                        self.storing.append((prompt, grant.keys))
            if prompt.loaded == len(prompt.keys):
                self.computing.remove(prompt)
                done.append(prompt)
        return done

    def complete(self) -> None:
        clock = self.clock
        storing, self.storing = self.storing, []
        for prompt, keys in storing:
            began = clock()
            self.core.complete_store(set(keys), prompt.name)
            self.spent["complete"] += clock() - began
            self.hand_over("complete")
        for prompt in [each for each in self.loading if each.ready_at <= self.step_number]:
            self.loading.remove(prompt)
            self.computing.append(prompt)
            loaded = set(prompt.keys[: prompt.loaded])
            began = clock()
            self.core.complete_load(loaded, prompt.name)
            self.spent["complete"] += clock() - began
            self.hand_over("complete")


def build(
    args: argparse.Namespace, policy: str, flow: str, others: RecoveredTier | None = None
) -> Core:
    slots = -(-args.chunks // SEGMENT) * SEGMENT
    segments = list(range(slots // SEGMENT))
    prompts = range(0, args.chunks, args.keys)
    held = [
        key
        for at in prompts
        for key in keys_of(args, at // args.keys, range(at, min(args.chunks, at + args.keys)))
    ]
    shares = None
    if args.tenants:
        its = Share(guaranteed=0.5 / args.tenants)
        shares = Shares({f"tenant-{number}": its for number in range(args.tenants)})
    opening = RecoveredTier(
        "disk",
        "disk",
        list(zip(held, range(args.chunks), strict=True)),
        SEGMENT,
        segments,
        len(segments),
    )
    tier = OwnedTier(0, opening, build_policy(policy, slots, shares), 1024, flow=Flow(flow))
    ahead = 0 if flow == "write-through" else args.rows // 10
    pool = HostPool(args.rows, build_policy(policy, args.rows, shares), None, ahead)
    peers = [] if others is None else [PeerTier(1, others, 1024)]
    return Core(pool, [tier, *peers], events=False)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def run(
    args: argparse.Namespace, policy: str, flow: str
) -> tuple[Server, list[dict[str, float]], list[float]]:
    """The steps of one core from its beginning, and the pauses of full collections."""
    server = Server(build(args, policy, flow), args, seed=1)
    gc.collect()
    gc.freeze()
    pauses: list[float] = []
    since = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal since
        if phase == "start":
            since = time.perf_counter()
        elif info["generation"] == 2:
            pauses.append(time.perf_counter() - since)

    gc.callbacks.append(watch)
    steps: list[dict[str, float]] = []
    for _ in range(args.steps):
        server.spent.clear()
        server.step()
        steps.append(dict(server.spent))
    gc.callbacks.remove(watch)
    gc.unfreeze()
    return server, steps, pauses


def measure(args: argparse.Namespace, policy: str, flow: str) -> dict[str, Any]:
    """One row. Of each step the fastest of the rounds counts: all do the same."""
    server, steps, pauses = run(args, policy, flow)
    for _ in range(args.rounds - 1):
        _, again, more = run(args, policy, flow)
        assert [each.keys() for each in again] == [each.keys() for each in steps]
        steps = [
            {call: min(one[call], other[call]) for call in one}
            for one, other in zip(steps, again, strict=True)
        ]
        pauses = min(pauses, more, key=lambda each: max(each, default=0.0))
    start, steady = steps[:START], steps[START:]
    whole = [sum(each.values()) * 1e3 for each in steady]
    row: dict[str, Any] = {
        "policy": policy,
        "flow": flow,
        "p50_ms": round(quantile(whole, 0.5), 2),
        "p99_ms": round(quantile(whole, 0.99), 2),
        "max_ms": round(max(whole), 2),
        "start_ms": round(max(sum(each.values()) for each in start) * 1e3, 2),
    }
    for call in CALLS:
        spent = [each.get(call, 0.0) * 1e3 for each in steady]
        row[call] = [round(quantile(spent, 0.99), 2), round(max(spent), 2)]
    row |= {
        "gc_full_ms": round(max(pauses, default=0.0) * 1e3, 2),
        "finished": server.finished,
        "moved": server.disk.moved,
        "hit_percent": round(100 * server.hits / max(1, server.asked), 1),
        "stores_deferred": server.stores_deferred,
    }
    if args.profile:
        worst = max(range(len(whole)), key=whole.__getitem__)
        print(f"worst step {worst + START}: {steady[worst]}", file=sys.stderr)
    return row


def beside_neighbour(args: argparse.Namespace, policy: str, flow: str) -> list[dict[str, Any]]:
    """Rows of the phases of a lane of others that appears and goes."""
    with tempfile.TemporaryDirectory() as folder:
        neighbour = Neighbour(Path(folder), args.neighbour)
        core = build(args, policy, flow, neighbour.recovered)
        server = Server(core, args, seed=1, news=neighbour.take)
        gc.collect()
        gc.freeze()

        def step() -> float:
            server.spent.clear()
            server.step()
            return sum(server.spent.values())

        for _ in range(START):
            step()
        rows = list(phases(neighbour, step, lambda: len(core.tiers[1].entries)))
        neighbour.end()
    return [{"policy": policy, "flow": flow, **row} for row in rows]


def case(args: argparse.Namespace, tree: Path, policy: str, flow: str) -> list[dict[str, Any]]:
    """Rows measured in a process of its own over the code in `tree`: one, without a neighbour."""
    command = [sys.executable, __file__, "--one", "--policies", policy, "--flows", flow]
    names = ("rows", "chunks", "waiting", "keys", "steps", "rounds", "clock", "arrivals", "portion")
    for name in (*names, "neighbour", "tenants"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows for people; for each call p99 and maximum."""
    heads = ["revision", "policy", "flow", "p50_ms", "p99_ms", "max_ms", "start_ms", *CALLS]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        cells = [" / ".join(map(str, v)) if isinstance(v := row[h], list) else v for h in heads]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--flows", default=",".join(FLOWS))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--arrivals", type=int, default=ARRIVALS)
    parser.add_argument("--portion", type=int, default=PORTION)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1, help="more on machines that others use")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time of the thread, for machines that others use",
    )
    parser.add_argument("--neighbour", type=int, default=0, metavar="CHUNKS")
    parser.add_argument("--tenants", type=int, default=0, help="that have prompts of their own")
    parser.add_argument("--against", metavar="REV", help="measure this revision too, in turn")
    parser.add_argument("--profile", action="store_true", help="name the worst step of --one")
    parser.add_argument("--one", action="store_true", help="one case, in this process")
    args = read_options(
        parser,
        policies="lru",
        flows="write-through",
        rows=2000,
        chunks=2000,
        waiting=4,
        keys=50,
        steps=80,
        rounds=1,
    )
    if args.dry:
        args.neighbour = min(args.neighbour, 2000)
    policies, flows = args.policies.split(","), args.flows.split(",")
    if args.one:
        policy, flow = policies[0], flows[0]
        beside = args.neighbour > 0
        done = beside_neighbour(args, policy, flow) if beside else [measure(args, policy, flow)]
        print(json.dumps(done))
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as place:
        trees = {"this": ROOT}
        if args.against:
            other = place.enter_context(checked_out(args.against, Path(folder) / "tree"))
            trees = {args.against: other, **trees}
        rows = []
        for policy in policies:
            for flow in flows:
                for name, tree in trees.items():
                    for row in case(args, tree, policy, flow):
                        rows.append({"revision": name, **row})
                        print(json.dumps(rows[-1]), flush=True)
    if not args.neighbour:
        print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
