"""``kvstore advise``: which sizes, policies and flow suit a server, and whether a disk pays.

A trace of what the server was asked for is replayed through the core with sizes up to those that
may be used: see `kvstore.simulation`. What a chunk costs to compute and to read is told by the
operator, or by the metrics of the server. Without a trace only that is judged.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.config import Config
from kvstore.config.model import HOST_ALONE
from kvstore.core import Flow
from kvstore.errors import ConfigError
from kvstore.plugins import Choice
from kvstore.simulation import Costs, Outcome, Setup, Trace, read_trace, replay
from kvstore.sizes import format_size
from kvstore.tools.output import parse_bytes, print_json, print_table, whole_number
from kvstore.tools.replays import (
    DEFAULT_PART,
    about,
    add_costs,
    chunks_of,
    costs_of,
    note,
    print_trace,
    progress_of,
    sampled,
    scaled,
)
from kvstore.tools.top import is_url, scrape

__all__ = ["add_advise_arguments", "run_advise"]

PROMPTS = 8
"""Of the longest but one in a hundred, which the host memory of a sample holds, if that does not
make it more than so many times as large."""

REPLAYED = 400_000
"""Accesses that one replay has, at most about; a longer trace is sampled by conversations."""

PARTS = (1 / 8, 1 / 4, 1 / 2, 1)
"""Of the largest disk, the sizes that are tried."""

WORTH = 0.01
"""Hits per access that a larger disk, or another policy than the default, has to bring."""

COLUMNS = (
    ">host", "policy", ">disk", "policy", "flow", ">hits %", ">host %", ">disk %", ">written/hit",
    ">s saved",
)  # fmt: skip

AHEAD = Config(cpu_bytes_to_use=1).demote_ahead
"""Share of host memory that a demoting flow keeps free or copied by default."""

DENSITY = Choice("hit-density")

MOST_CHUNKS = 10**10
"""More than any trace has, and than any disk holds."""


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "where", metavar="TRACE|URL",
        help="a trace, such as record_trace writes; or a server's metrics",
    )  # fmt: skip
    parser.add_argument(
        "--host",
        help="host memory: chunks, percent of the trace's chunks, or bytes; 10%% by default",
    )  # fmt: skip
    parser.add_argument(
        "--disk", default="100%", help="disk there is at most, in the same way; 100%% by default"
    )
    parser.add_argument(
        "--chunk-bytes", type=parse_bytes, help="size of a chunk, if the trace does not give it"
    )
    parser.add_argument(
        "--server", metavar="URL", help="its metrics, for the seconds to compute and read a chunk"
    )
    add_costs(parser)
    parser.add_argument("--limit", type=whole_number, help="use the first N requests only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_advise(options: argparse.Namespace) -> int:
    """Print what was tried, and what to do.

    Raises:
        KVStoreError: if the trace cannot be read, the server does not answer, or a size is wrong.
    """
    from_url = is_url(options.where)
    costs = _costs(options, options.where if from_url else options.server)
    if from_url:
        return _of_server(options, costs)
    trace = read_trace(Path(options.where), limit=options.limit)
    if not trace.accesses:
        raise ConfigError(f"{trace.name}: no request asks for a chunk")
    size = options.chunk_bytes or trace.chunk_bytes
    # The default must also work for a trace so short that 10 % is less than a chunk.
    host = max(1, trace.unique // DEFAULT_PART)
    if options.host is not None:
        host = min(MOST_CHUNKS, chunks_of("--host", options.host, trace, size))
    if host < 1:
        raise ConfigError(f"--host {options.host}: must be at least one chunk")
    # More than all chunks of the trace hits no more.
    disk = min(trace.unique, chunks_of("--disk", options.disk, trace, size))
    tried = _Trial(trace, size, costs, host)
    advice = tried.advise(host, disk)
    note("")
    best = advice.best
    if options.json:
        print_json(
            {
                "trace": about(trace, tried.part),
                "chunk_bytes": size,
                "compute_s": costs.compute,
                "deeper_s": costs.deeper,
                "read_s": costs.read,
                "tried": [tried.told(outcome) for outcome in tried.outcomes.values()],
                "best": tried.told(best),
                "config": tried.config(best.setup) if size is not None and best.hits else None,
                "advice": advice.sentences,
            }
        )
        return 0
    print_trace(trace, tried.part)
    print("* is advised; s saved are seconds of computing, where it is known what chunks cost")
    print_table(COLUMNS, (tried.row(outcome, best) for outcome in tried.outcomes.values()))
    print()
    print("\n".join(advice.sentences))
    if size is not None and best.hits:
        print(
            "\n# Path and identity are yours. vLLM sets chunk_bytes and identity: leave them out."
        )
        print("\n".join(_toml(tried.config(best.setup))))
    return 0


@dataclass
class _Advice:
    best: Outcome
    sentences: list[str]


class _Trial:
    """Replays of one trace, in the order in which they were made."""

    def __init__(self, trace: Trace, size: int | None, costs: Costs, host: int) -> None:
        lengths = sorted(map(len, trace.requests))
        self._longest = lengths[-1]
        # Host memory, scaled, has to hold some prompts, as it does.
        rate = REPLAYED / max(1, trace.accesses)
        most = lengths[len(lengths) * 99 // 100]
        rate = min(1.0, max(rate, min(PROMPTS * rate, PROMPTS * most / host)))
        self.part = sampled(trace, rate, 0) or trace
        self.outcomes: dict[Setup, Outcome] = {}
        self._trace, self._size, self._costs = trace, size, costs
        self._priced = costs.pays_from is not None
        """Whether both costs are known, so that outcomes are compared by the computing saved."""
        self._whole = trace.accesses / max(1, self.part.accesses)
        """What a sum over the part is multiplied with for the whole trace."""

    def advise(self, host: int, disk: int) -> _Advice:
        """Choose, first without a disk, then its size, then policy and flow at that size."""
        whole = self._replayed(Setup(self._trace.unique))
        if not whole.hits:
            return _Advice(whole, ["Nothing is asked for again: no cache helps, of any size."])
        sentences = [
            f"With room for all, {_percent(whole.hit_ratio)} of the chunks asked for would be "
            "hits; the others are asked for once, or follow one that is."
        ]
        best = alone = self._better(Setup(host, host_policy=HOST_ALONE), Setup(host))
        if self._costs.pays_from == math.inf:
            assert self._costs.compute is not None
            assert self._costs.read is not None
            sentences.append(
                f"A disk does not pay: reading a chunk takes {1000 * self._costs.read:.3g} ms, and "
                f"computing it {1000 * self._costs.compute:.3g} ms."
            )
        elif disk:
            best = self._with_disk(host, disk, alone, sentences)
        sentences.append(self._of_host(best, alone, whole))
        if self._longest > host:
            sentences.append(
                f"The longest prompt has {self._longest} chunks, more than host memory: counted is "
                "the part of it that fits, as for vLLM. Where prompts are streamed through host "
                "memory (get_into, windows, SGLang, LMCache) a disk brings more than is said here."
            )
        if (saved := self._costs.saved(best)) is not None:
            per = 1000 * saved / max(1, best.requests)  # Both of the part.
            sentences.append(f"It saves {per:.3g} s of computing per 1,000 requests.")
        return _Advice(best, sentences)

    def _with_disk(self, host: int, disk: int, alone: Outcome, sentences: list[str]) -> Outcome:
        sizes = sorted({max(1, round(part * disk)) for part in PARTS})
        by_size = [self._replayed(Setup(host, size)) for size in sizes]
        if alone.setup.host_policy == HOST_ALONE:
            dense = Setup(host, host_policy=DENSITY, disk_policy=DENSITY)
            others = [self._replayed(replace(dense, disk=size)) for size in sizes]
            if self._worth(others[-1]) > self._worth(by_size[-1]) + WORTH:
                by_size = others
        most = max(map(self._worth, by_size))
        if most < self._worth(alone) + WORTH:
            more = max(0.0, most - self._worth(alone))
            sentences.append(
                f"A disk does not pay: at best it brings {self._points(more)} more than host "
                "memory alone."
            )
            return alone
        plain = next(one for one in by_size if self._worth(one) > most - WORTH)
        size, ahead = plain.setup.disk, int(host * AHEAD)
        demoting = replace(plain.setup, host=host - ahead, flow=Flow.DEMOTE, reserve=ahead)
        best = self._better(
            plain.setup,
            replace(plain.setup, disk_policy=DENSITY),
            replace(plain.setup, host_policy=DENSITY, disk_policy=DENSITY),
            demoting,
            replace(demoting, disk_policy=DENSITY),
        )
        pays = "A disk pays"
        if not self._priced:
            pays += " where a chunk is read sooner than it is computed"
        sentences.append(
            f"{pays}: with {self._shown(size)} of it hits are {_percent(best.hit_ratio)}, without "
            f"it {_percent(alone.hit_ratio)}; per hit {self._written(best)} are written to it."
        )
        if plain is not by_size[-1]:
            sentences.append(
                f"More than {self._shown(size)} of disk, up to {self._shown(sizes[-1])}, brings "
                f"less than {self._points(WORTH)}."
            )
        elif disk < self._trace.unique and by_size[-1].hit_ratio < self._limit - WORTH:
            sentences.append("More disk than there is would bring more hits.")
        if best.setup.flow is Flow.DEMOTE:
            sentences.append(
                "The flow demote keeps what is hot in host memory only: a server that is killed "
                "loses it, one that is stopped in order does not. Else take write-through: "
                f"{_percent(plain.hit_ratio)}."
            )
        return best

    @property
    def _limit(self) -> float:
        return self.outcomes[Setup(self._trace.unique)].hit_ratio

    def _of_host(self, best: Outcome, alone: Outcome, whole: Outcome) -> str:
        host = best.setup.host + best.setup.reserve
        if alone.hit_ratio > whole.hit_ratio - WORTH:
            return f"{self._shown(host)} of host memory hold all that is asked for again."
        share = best.host_hits / max(1, best.hits)
        return f"{self._shown(host)} of host memory serve {_percent(share)} of these hits."

    def _replayed(self, setup: Setup) -> Outcome:
        if setup not in self.outcomes:
            scale = self.part.unique / self._trace.unique
            ahead = round(setup.reserve * scale)
            self.outcomes[setup] = replay(
                self.part,
                replace(scaled(setup, scale), reserve=ahead),
                chunk_bytes=self._size,
                progress=progress_of(f"replay {len(self.outcomes) + 1} of at most 15", self.part),
            )
            # As the operator would set it, not as the sample was replayed.
            self.outcomes[setup].setup = setup
        return self.outcomes[setup]

    def _better(self, first: Setup, *others: Setup) -> Outcome:
        """The first, or another that brings so much more that it is worth a change."""
        best = start = self._replayed(first)
        for setup in others:
            one = self._replayed(setup)
            if self._worth(one) > max(self._worth(best), self._worth(start) + WORTH):
                best = one
        return best

    def _worth(self, outcome: Outcome) -> float:
        """What an outcome is chosen by: computing saved where all costs are known, else hits."""
        return self._costs.share_saved(outcome) if self._priced else outcome.hit_ratio

    def _points(self, share: float) -> str:
        return f"{100 * share:.2g} points of {'computing saved' if self._priced else 'hits'}"

    def _shown(self, chunks: int) -> str:
        return f"{chunks} chunks" if self._size is None else format_size(chunks * self._size)

    def _written(self, outcome: Outcome) -> str:
        if not outcome.hits:
            return "-"
        per = outcome.disk_writes / max(1, outcome.hits)
        if self._size is None:
            return f"{per:.2g} chunks"
        return format_size(int(per * self._size))

    def row(self, outcome: Outcome, best: Outcome) -> Sequence[str]:
        """A row of the table; the one to take is marked."""
        setup, asked = outcome.setup, max(1, outcome.accesses)
        saved = self._costs.saved(outcome)
        disk = setup.disk > 0
        return (
            ("* " if outcome is best else "") + self._shown(setup.host + setup.reserve),
            str(setup.host_policy),
            self._shown(setup.disk) if disk else "-",
            str(setup.disk_policy) if disk else "-",
            setup.flow.value if disk else "-",
            f"{100 * outcome.hit_ratio:.2f}",
            f"{100 * outcome.host_hits / asked:.2f}",
            f"{100 * outcome.disk_hits / asked:.2f}",
            self._written(outcome) if disk else "-",
            "-" if saved is None else f"{saved * self._whole:.0f}",
        )

    def told(self, outcome: Outcome) -> dict[str, Any]:
        """An outcome for programs."""
        setup = outcome.setup
        saved = self._costs.saved(outcome)
        whole = self._whole
        return {
            "host_chunks": setup.host + setup.reserve,
            "host_policy": str(setup.host_policy),
            "disk_chunks": setup.disk,
            "disk_policy": str(setup.disk_policy) if setup.disk else None,
            "flow": setup.flow.value if setup.disk else None,
            "hit_ratio": outcome.hit_ratio,
            "host_hits": round(outcome.host_hits * whole),
            "disk_hits": round(outcome.disk_hits * whole),
            "disk_writes": round(outcome.disk_writes * whole),
            "accesses": round(outcome.accesses * whole),
            "saved_s": None if saved is None else saved * whole,
        }

    def config(self, setup: Setup) -> dict[str, Any]:
        """What to write into the configuration.

        Raises:
            ConfigError: if the size of a chunk is not known.
        """
        if self._size is None:
            raise ConfigError("the size of a chunk is not known: give --chunk-bytes")
        size = self._size
        values: dict[str, Any] = {
            "chunk_bytes": size,
            "cpu_bytes_to_use": (setup.host + setup.reserve) * self._size,
            "eviction_policy": _named(setup.host_policy),
        }
        if setup.disk:
            values["identity"] = {"model": "name", "weights": "v1"}
            values["tiers"] = [
                {
                    "type": "disk",
                    "path": "/nvme/kv",
                    "capacity_bytes": setup.disk * size,
                    "eviction_policy": _named(setup.disk_policy),
                    "flow": setup.flow.value,
                }
            ]
        return values


def _of_server(options: argparse.Namespace, costs: Costs) -> int:
    """Judge a server by its metrics alone."""
    sentences = []
    depth = costs.pays_from
    if depth is None:
        sentences.append("The server has not yet computed and read enough to tell what each takes.")
    else:
        assert costs.compute is not None
        assert costs.read is not None
        verdict = "does not pay" if depth == math.inf else "pays"
        if 0 < depth < math.inf:
            verdict += f" for chunks behind {math.ceil(depth)} others or more"
        sentences.append(
            f"A disk {verdict}: a chunk is computed in {1000 * costs.compute:.3g} ms, and read "
            f"in {1000 * costs.read:.3g} ms."
        )
    sentences.append(
        "Sizes, policies and flow need what was asked for: set record_trace to a file, let it "
        f"serve for a day, then: kvstore advise FILE --server {options.where}"
    )
    if options.json:
        told = {"compute_s": costs.compute, "deeper_s": costs.deeper, "read_s": costs.read}
        print_json({**told, "advice": sentences})
    else:
        print("\n".join(sentences))
    return 0


def _costs(options: argparse.Namespace, url: str | None) -> Costs:
    """What is known of a chunk's cost; what is given counts for more than what is measured."""
    costs = Costs()
    if url is not None:
        now = scrape(url)
        disks = [tier for tier in now.tiers if tier.partition("-")[0] == "disk"]
        reads = [now.mean("tier_seconds_per_chunk", tier) for tier in disks]
        known = [each for each in reads if each > 0]
        computed = now.mean("compute_seconds_per_chunk") or None
        costs = Costs(computed, read=min(known, default=None))
    return costs_of(options, costs)


def _named(choice: Choice) -> str | dict[str, Any]:
    """A policy as the configuration takes it."""
    return {"name": choice.name, **dict(choice.parameters)} if choice.parameters else choice.name


def _toml(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key == "tiers":
            for tier in value:
                yield "\n[[tiers]]"
                yield from _toml(tier)
        elif isinstance(value, dict):
            pairs = ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items())
            yield f"{key} = {{{pairs}}}"
        else:
            yield f"{key} = {json.dumps(value)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
