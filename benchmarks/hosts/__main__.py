"""What one host has computed, another finds: over a good network, and over bad ones.

    python -m benchmarks.hosts [--stores mooncake,redis] [--what faults,places,down,far]

Two hosts are two network namespaces of this machine with a cable between them (`cable.py`). Each
has an engine (that of `examples.paged_engine`, or with `--engine vllm` a real vLLM), host memory
and a disk of its own; on the first one is the store's server, too. The first host computes prompts.
Then something happens, and the second host serves the same prompts, one after the other. Told are
the prompts that it found, the median and the longest time to the first token, how long a request
waited for chunks at most, and how long after the fault prompts were found again. What it takes to
compute a prompt is told beside; while a transfer is under way it takes longer, as Mooncake's client
polls without a pause. Status 1 if a token differs, or a request waits for longer than the deadline
and a step. Needs root.

`places` tells the time to the first token of prompts that are computed, found on the other host,
and found on the own disk after a start; `down` the throughput of an engine whose store is down
against that of one without a store, in turns: quartiles of the rounds; `far` the time to the first
token of prompts that nobody has, with a store whose answers take `--away-ms`, against none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dry import read_options
from benchmarks.hosts.cable import ADDRESSES, Cable, Quality

NAMES = ("kvstore-one", "kvstore-two")

DEADLINE_S = 1.0

POOL = 512 * 2**20

KV_BYTES = 8192
"""Of a token, by the model of the hosts."""

PROGRAMS = {"paged": "host.py", "vllm": "vllm_host.py"}
"""Hosts, by their engine."""

FOLDER = Path(__file__).resolve().parent


class Process:
    """A program of this folder in a namespace, told what to do line by line."""

    def __init__(self, namespace: str, program: str, told: dict[str, Any], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, str(FOLDER / program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": "2000"},
            )
        self._log = log
        self.said = self._ask(told)

    def do(self, what: str, **words: Any) -> dict[str, Any]:
        """Let it do something, and wait for what it says."""
        return self._ask({"do": what, **words})

    def kill(self) -> None:
        """Kill -9."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Let it end by itself, or kill it after a minute."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            # Libraries print there, too.
            with contextlib.suppress(ValueError):
                said: dict[str, Any] = json.loads(line)
                return said
        raise RuntimeError(f"it has ended: {self._log.read_text()[-3000:]}")


@dataclass
class Scene:
    """Two hosts, the server of their store, and the cable between them."""

    options: argparse.Namespace
    cable: Cable
    server: Process
    one: Process
    two: Process
    folder: Path
    told: dict[str, Any]
    _next: int = 1000

    def fresh(self) -> list[int]:
        """Seeds of prompts that nobody has served: far from those of the start, whatever sign."""
        self._next += self.options.prompts
        return list(range(self._next, self._next + self.options.prompts))


@contextmanager
def scene(options: argparse.Namespace, store: str, room: int = POOL) -> Iterator[Scene]:
    """Two hosts that have just started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-hosts-")))
        cable = Cable(NAMES)
        stack.callback(cable.close)
        asked = {"store": store, "host": ADDRESSES[0], "room": room}
        server = Process(NAMES[0], "server.py", asked, folder / "server.log")
        stack.callback(server.end)
        hosts: list[Process] = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            tier = dict(server.said)
            if store == "mooncake":
                # The second one's values would be lost with it, and not tell anything.
                tier |= {"host": address, "contribute_bytes": 0 if hosts else room}
            told = {
                "tokens": options.tokens,
                "disk": str(folder / name),
                "store": tier,
                "deadline_s": DEADLINE_S,
            }
            hosts.append(Process(name, PROGRAMS[options.engine], told, folder / f"{name}.log"))
            stack.callback(hosts[-1].end)
        one, two = hosts
        made = Scene(options, cable, server, one, two, folder, told)
        for number, host in enumerate(hosts):
            # Memory is touched, connections are made, and it is known how long computing takes.
            host.do("serve", seeds=[-1, -2 - number, -4 - number])
            host.do("settle", seconds=20)
        yield made
        if options.logs:
            for log in folder.glob("*.log"):
                print(f"== {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)


def _nothing(scene: Scene) -> None:
    return


def _quality(**of: float) -> Callable[[Scene], None]:
    return lambda scene: scene.cable.set(Quality(**of))


def _mended(scene: Scene) -> None:
    scene.cable.set(Quality())


def _server_stops(scene: Scene) -> None:
    scene.server.do("stop")


def _server_starts(scene: Scene) -> None:
    scene.server.do("start")


def _server_starts_again(scene: Scene) -> None:
    _server_stops(scene)
    _server_starts(scene)


def _first_host_dies(scene: Scene) -> None:
    scene.one.kill()


FAULTS: dict[str, tuple[Callable[[Scene], None], Callable[[Scene], None]]] = {
    "nothing": (_nothing, _nothing),
    "200 ms of delay": (_quality(delay_s=0.1), _mended),
    "10 Mbit/s": (_quality(bytes_per_s=1.25e6), _mended),
    "1 % of frames lost": (_quality(loss=0.01), _mended),
    "cable cut": (_quality(loss=1.0), _mended),
    "server killed": (_server_stops, _server_starts),
    "server killed and started": (_server_starts_again, _nothing),
    "first host killed": (_first_host_dies, _nothing),
    "full": (_nothing, _nothing),
}

LASTING = ("nothing", "first host killed", "full")
"""After these nothing is to be found again."""


def run(options: argparse.Namespace, store: str, fault: str) -> dict[str, Any]:
    """A row of the table."""
    happens, mends = FAULTS[fault]
    # Full with two or three of these prompts besides those of the start.
    room = int(5.5 * options.tokens * KV_BYTES) if fault == "full" else POOL
    with scene(options, store, room) as made:
        seeds = made.fresh()
        right = made.one.do("serve", seeds=seeds)
        made.one.do("settle", seconds=30)
        computing = statistics.median(right["seconds"])
        happens(made)
        served = made.two.do("serve", seeds=seeds)
        mends(made)
        row = {
            "store": store,
            "fault": fault,
            "found": sum(count > 0 for count in served["found"]),
            "prompts": len(seeds),
            "median_s": round(statistics.median(served["seconds"]), 3),
            "longest_s": round(max(served["seconds"]), 3),
            "longest_wait_s": round(max(served["waited"]), 3),
            "computing_s": round(computing, 3),
            "wrong": sum(a != b for a, b in zip(served["said"], right["said"], strict=True)),
        }
        if fault not in LASTING:
            row["found_again_s"] = found_again(made)
        return row


def found_again(made: Scene, patience: float = 90.0) -> float | None:
    """Seconds until the second host finds what the first has computed since."""
    began = time.monotonic()
    while time.monotonic() - began < patience:
        seeds = made.fresh()[:1]
        made.one.do("serve", seeds=seeds)
        made.one.do("settle", seconds=30)
        if made.two.do("serve", seeds=seeds)["found"][0]:
            return round(time.monotonic() - began, 1)
        made.one.do("idle", seconds=0.5)
    return None


def places(options: argparse.Namespace, store: str) -> dict[str, Any]:
    """How long it takes to the first token, by where a prompt is found."""
    with ExitStack() as stack:
        made = stack.enter_context(scene(options, store))
        seeds = made.fresh()
        computed = made.one.do("serve", seeds=seeds)
        made.one.do("settle", seconds=30)
        elsewhere = made.two.do("serve", seeds=seeds)
        # As the first host, started again, without the store.
        made.one.end()
        told = {**made.told, "disk": str(made.folder / NAMES[0]), "store": None}
        again = Process(NAMES[0], PROGRAMS[options.engine], told, made.folder / "again.log")
        stack.callback(again.end)
        again.do("serve", seeds=[-1])
        own = again.do("serve", seeds=seeds)
        row: dict[str, Any] = {"store": store, "tokens": options.tokens, "wrong": 0}
        for place, served in (("computed", computed), ("other_host", elsewhere), ("own_disk", own)):
            row[f"{place}_ms"] = round(1000 * statistics.median(served["seconds"]), 1)
            row["wrong"] += served["said"] != computed["said"]
            row[f"{place}_tokens_found"] = sum(served["found"])
        row["kept"] = not row["wrong"]
        return row


def against_none(
    options: argparse.Namespace,
    store: str,
    happens: Callable[[Scene], None],
    measure: Callable[[Process, list[int]], float],
) -> list[float]:
    """What an engine with a store measures over one without, in turns, after something happens."""
    with ExitStack() as stack:
        made = stack.enter_context(scene(options, store))
        told = {**made.told, "disk": str(made.folder / "plain"), "store": None}
        plain = Process(NAMES[1], PROGRAMS[options.engine], told, made.folder / "plain.log")
        stack.callback(plain.end)
        happens(made)
        ratios = []
        for number in range(options.rounds + 1):
            seeds = made.fresh()
            measured = {}
            for who in (made.two, plain) if number % 2 else (plain, made.two):
                measured[who] = measure(who, seeds)
                who.do("settle", seconds=30)
            if number:
                ratios.append(measured[made.two] / measured[plain])
        return ratios


def down(options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Prompts per second with a store that is down, against none."""

    def rate(host: Process, seeds: list[int]) -> float:
        return float(host.do("rate", seeds=seeds)["rate"])

    ratios = against_none(options, store, _server_stops, rate)
    return _quartiles("down_against_none", store, ratios)


def far(options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Time to the first token of prompts that nobody has, with a store far away, against none."""

    def first_token(host: Process, seeds: list[int]) -> float:
        seconds: list[float] = host.do("serve", seeds=seeds)["seconds"]
        return statistics.median(seconds)

    happens = _quality(delay_s=options.away_ms / 2000)
    ratios = against_none(options, store, happens, first_token)
    return _quartiles("far_against_none", store, ratios)


def _quartiles(name: str, store: str, ratios: list[float]) -> dict[str, Any]:
    quartiles = [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
    return {"store": store, "rounds": len(ratios), "kept": True, name: quartiles}


def main() -> int:
    """Print a JSON row for each fault; 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stores", default="mooncake,redis")
    parser.add_argument("--engine", choices=PROGRAMS, default="paged")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--what", default="faults,places,down,far")
    parser.add_argument("--rounds", type=int, default=12, help="of `down` and `far`")
    parser.add_argument("--away-ms", type=float, default=100.0, help="of `far`, there and back")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--logs", action="store_true", help="what the hosts wrote, afterwards")
    options = read_options(
        parser,
        stores="redis",
        engine="paged",
        faults="",
        what="places",
        rounds=1,
        prompts=1,
        tokens=64,
    )
    kept = True
    what = options.what.split(",")
    for store in options.stores.split(","):
        for measure in (places, down, far):
            if measure.__name__ in what:
                row = measure(options, store)
                kept &= row["kept"]
                print(json.dumps(row), flush=True)
        for fault in options.faults.split(",") if "faults" in what else ():
            row = run(options, store, fault)
            row["kept"] = (
                not row["wrong"] and row["longest_wait_s"] <= DEADLINE_S + row["computing_s"]
            )
            kept &= row["kept"]
            print(json.dumps(row), flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
