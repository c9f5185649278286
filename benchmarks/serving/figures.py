"""From answers to a table of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.serving.clients import Turn

__all__ = ["Figures", "Round", "grown", "rows", "table"]

MEASURES = ("ttft_mean_s", "ttft_p95_s", "total_s", "cpu_s")


@dataclass(frozen=True, slots=True)
class Round:
    """What one server did in one round.

    Attributes:
        after: seconds that it still worked when all was answered.
        cpu: seconds of processor time, that work included.
        sources: tokens that were not computed, by where they came from.
        counters: what its cache has counted.
    """

    turn: Turn
    after: float
    cpu: float
    sources: Mapping[str, int]
    counters: Mapping[str, int]


@dataclass(slots=True)
class Figures:
    """What one server did in all rounds of one setting.

    Attributes:
        first_token: seconds until the first token of each request, by round.
        totals, after, cpu: seconds of each round, see `Round`.
        cached: tokens of prompts that were not computed.
        sources: the same by where they came from, of vLLM's metrics.
        counters: what the cache has counted.
        different: requests that were answered otherwise than without offload.
    """

    first_token: list[list[float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cached: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    different: int = 0

    def add(self, found: Round, expected: Round) -> None:
        """Add a round, to be held against the same round without offload."""
        answers, right = found.turn.answers, expected.turn.answers
        self.first_token.append([answer.first_token for answer in answers.values()])
        self.totals.append(found.turn.seconds)
        self.after.append(found.after)
        self.cpu.append(found.cpu)
        self.cached += sum(answer.cached for answer in answers.values())
        self.different += sum(
            answer.tokens != right[place].tokens for place, answer in answers.items()
        )
        for total, more in ((self.sources, found.sources), (self.counters, found.counters)):
            for name, count in more.items():
                total[name] = total.get(name, 0) + count

    def measures(self) -> dict[str, float]:
        """By the names of `MEASURES`, of the faster half of the rounds.

        The others say more of what else the machine did. Totals are means of a round.
        """
        ranked = sorted(range(len(self.totals)), key=self.totals.__getitem__)
        kept = ranked[: -(-len(ranked) // 2)]
        ordered = sorted(seconds for number in kept for seconds in self.first_token[number])
        return {
            "ttft_mean_s": sum(ordered) / len(ordered),
            "ttft_p95_s": ordered[max(0, -(-len(ordered) * 95 // 100) - 1)],
            "total_s": sum(self.totals[number] for number in kept) / len(kept),
            "cpu_s": sum(self.cpu[number] for number in kept) / len(kept),
        }


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By how much each has grown; what has not is left out."""
    more = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in more.items() if count}


def rows(setting: str, found: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """One row for each server, with its ratios to those that were measured beside it."""
    measured = {name: its.measures() for name, its in found.items()}
    listed = []
    for name, its in found.items():
        row: dict[str, Any] = {"setting": setting, "server": name, **measured[name], **asdict(its)}
        for base in ("none", "native"):
            if base in found:
                row[f"of_{base}"] = {
                    key: measured[name][key] / measured[base][key] for key in MEASURES
                }
                row[f"rounds_of_{base}"] = [
                    mine / theirs
                    for mine, theirs in zip(its.totals, found[base].totals, strict=True)
                ]
        listed.append(row)
    return listed


def table(listed: Sequence[Mapping[str, Any]]) -> str:
    """Times, and in brackets their ratios to no offload and to vLLM's own; below 1 is better."""
    head = ("setting", "server", "first token", "95 %", "total", "processor", "cached", "wrong")
    lines: list[tuple[str, ...]] = [head]
    for row in listed:
        cells = [str(row["setting"]), str(row["server"])]
        for key, unit, factor in (
            ("ttft_mean_s", "ms", 1000),
            ("ttft_p95_s", "ms", 1000),
            ("total_s", "s", 1),
            ("cpu_s", "s", 1),
        ):
            ratios = [f"{row[name][key]:.2f}" for name in ("of_none", "of_native") if name in row]
            digits = 0 if unit == "ms" else 1
            cells.append(f"{row[key] * factor:.{digits}f} {unit} ({', '.join(ratios)})")
        lines.append((*cells, str(row["cached"]), str(row["different"])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
