"""Health: whether a tier is worth asking and worth writing to.

`Health` is told the results of the tier's moves and, once a step, the time and what is under way.
It only judges; its callers act. `InFlight` counts the moves that a tier has under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvstore.core.residency.breaker import Breaker, State
from kvstore.core.residency.recompute import Average, Recompute
from kvstore.core.statistics import Durations
from kvstore.types import LogLine, Move, Op

__all__ = [
    "DEVICE_PAUSE",
    "FIRST_PAUSE",
    "LAST_PAUSE",
    "SLOW_PAUSE",
    "STORE_PAUSE",
    "Health",
    "InFlight",
]


class InFlight:
    """The moves under way, each with the time at which it was handed out.

    Attributes:
        rows: number of rows of host memory that they read or write.
        asking: number of questions to a store among them.
        reads, writes, asks: how long promotions, copies and questions took, from when they were
            handed out to when their ends were noticed.
    """

    def __init__(self) -> None:
        self._moves: dict[int, tuple[Move, float]] = {}
        self.rows = self.asking = 0
        self.reads = Durations()
        self.writes = Durations()
        self.asks = Durations()

    def __len__(self) -> int:
        return len(self._moves)

    def begin(self, move: Move, now: float) -> None:
        """Add a move that is handed out."""
        self._moves[move.id] = (move, now)
        self.rows += len(move.rows)
        self.asking += move.op is Op.ASK

    def end(self, move: Move, now: float) -> float:
        """Remove a move that has ended; returns when it was handed out."""
        _, started = self._moves.pop(move.id)
        self.rows -= len(move.rows)
        if move.op is Op.PROMOTE:
            self.reads.add(now - started)
        elif move.op is Op.CASCADE:
            self.writes.add(now - started)
        elif move.op is Op.ASK:
            self.asking -= 1
            self.asks.add(now - started)
        return started

    def since(self, *ops: Op) -> float | None:
        """Return when the first move under way that does one of these was handed out."""
        return next((started for move, started in self._moves.values() if move.op in ops), None)


FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0
"""Seconds before a tier whose calls fail is tried again: they double with each try that fails."""

STORE_PAUSE = 5.0
"""Seconds without new copies to a tier after a copy to it failed."""

MOST_EXTRAPOLATED = 32
"""For so many times the chunks whose reads were measured the measured pace counts."""

SLOW_PAUSE = 30.0
"""Seconds without a slow move after which a tier is not slow any more."""

DEVICE_PAUSE = 30.0
"""Seconds for which a device that failed to store is passed over while others work."""


class Health:
    """The health of one tier.

    Attributes:
        alive: whether it is in use and answers: neither closed, stalled, congested nor absent.
        readable: whether a promotion from it is worth waiting for: it is alive, and not outpaced.
        closed: it is not used any more.
        stalled: it has not answered for longer than two deadlines: its chunks are misses.
        congested: its reads under way already take longer than any request would wait.
        slow: it answers, but copies to it or its growth took seconds recently.
        calls: open while calls to it fail; one call at a time then tests whether it is back.
        copies: open from a failed copy to the next one that succeeds.
        pace: how long promotions take. recompute: whether computing its chunks again is faster.

    Args:
        name: name of the tier, for messages.
        devices: number of its devices.
    """

    def __init__(self, name: str, devices: int = 1) -> None:
        self._name = name
        self._devices = devices
        self._faulty: dict[int, float] = {}
        self._doubted: set[int] = set()
        self.alive = self.readable = True
        self.closed = self.stalled = self.congested = self.slow = False
        self.recompute = Recompute()
        self.pace = Average()
        self.calls = Breaker(FIRST_PAUSE, LAST_PAUSE)
        self.copies = Breaker(STORE_PAUSE)
        # What kind of call opened `calls`.
        self._failing: Op | None = None
        self._heard = False
        # Seconds without an answer, as far as steps were taken in that time.
        self._silent = 0.0
        # Chunks promoted in this step, when the first of their moves was begun and the last
        # ended, and the time up to which the pace was measured.
        self._arrived = 0
        self._arrived_since = self._arrived_by = 0.0
        self._measured = 0.0
        self._slow_since = 0.0
        # The time since which neither reads, which go first, nor a slow caller held up copies.
        self._unhindered = 0.0

    @property
    def hopeless(self) -> bool:
        """Whether not even chunks that are being read from it are worth waiting for."""
        return self.stalled or self.recompute.hopeless

    def accepts(self, now: float) -> bool:
        """Whether copies to it are worth trying."""
        usable = not self.closed and not self.stalled and self.calls.closed
        return usable and self.copies.ready(now)

    @property
    def cautious(self) -> bool:
        """Whether the last copy to it failed, so that one chunk is to be tried before many."""
        return not self.copies.closed

    @property
    def passed_over(self) -> Collection[int]:
        """Devices that failed to store recently; none if all of them did."""
        return () if self.ailing else self._faulty

    @property
    def ailing(self) -> bool:
        """Whether every device failed to store recently."""
        return len(self._faulty) == self._devices

    def close(self) -> None:
        """Mark it as closed: it is neither read nor written any more."""
        self.closed = True
        self._sum_up()

    def heard(self) -> None:
        """Note that a move has ended; its completion may be taken in later."""
        self._heard = True

    def answered(self) -> LogLine | None:
        """Note that the end of a move was taken in; returns a log line, if there is one."""
        self._heard = True
        if not self.stalled:
            return None
        self.stalled = False
        self._sum_up()
        return self._line("answers", "answers again")

    def failed(self, op: Op, now: float, error: str | None) -> LogLine | None:
        """Take in a call that failed as a whole; returns a log line, if there is one."""
        # While it is open, only the call that tests whether the tier is back counts: others were
        # begun before.
        if self.calls.state is State.OPEN:
            return None
        self._failing = op
        if not self.calls.trip(now):
            return None
        self._sum_up()
        text = f"is away: {error}; its chunks are misses until it answers"
        return self._line("away", text, error=error)

    def went_well(self, op: Op) -> LogLine | None:
        """Take in a call that succeeded; returns a log line, if there is one."""
        # As with `failed`: what was begun before does not tell whether the tier is back. A store
        # may answer questions and fail every read.
        proved = self._failing in (None, op)
        if self.calls.state is State.OPEN or not self.calls.close(proved=proved):
            return None
        self._sum_up()
        return self._line("back", "is back")

    def arrived(self, chunks: int, started: float, ended: float) -> None:
        """Note a promotion that read `chunks` chunks and lasted from `started` to `ended`."""
        if not chunks:
            # That nothing is there is told at once, and says nothing about reads.
            return
        if not self._arrived:
            self._arrived_since, self._arrived_by = started, ended
        self._arrived_since = min(self._arrived_since, started)
        self._arrived_by = max(self._arrived_by, ended)
        self._arrived += chunks

    def stored(self, devices: Iterable[int]) -> None:
        """Note that copies to these devices succeeded."""
        if self._faulty or self._doubted:
            for device in devices:
                self._faulty.pop(device, None)
                self._doubted.discard(device)

    def at_fault(self, failed: Mapping[int, int]) -> list[int]:
        """Return which devices are at fault, given failed chunks; a first one may be its slot's."""
        faulty = [n for n, chunks in failed.items() if chunks > 1 or n in self._doubted]
        self._doubted.update(failed)
        return faulty

    def refused(self, devices: Collection[int], now: float) -> None:
        """Pass over these devices, where copies failed, for a while; if none is left, pause."""
        self._faulty.update(dict.fromkeys(devices, now + DEVICE_PAUSE))
        if devices and self.ailing:
            self.copies.trip(now)

    def recovered(self, now: float) -> bool:
        """Note that a copy succeeded; returns whether that ends the pause after a failure."""
        return self.copies.ready(now) and self.copies.close()

    def gauges(self) -> dict[str, Any]:
        """Return its part of `TierStats`."""
        return {
            "closed": self.closed,
            "stalled": self.stalled,
            "congested": self.congested,
            "slow": self.slow,
            "away": not self.calls.closed,
            "outpaced": self.recompute.outpaced,
            "read_pace": self.pace.per_chunk,
        }

    def watch(
        self,
        now: float,
        elapsed: float,
        deadline: float,
        max_wait: float,
        in_flight: InFlight,
        reading: int,
        writing: bool,
        compute: float,
    ) -> tuple[list[LogLine], bool]:
        """Update the health, once a step.

        When the last step was longer ago than `deadline`, `elapsed` says
        more about the caller than about the tier.

        Args:
            in_flight: its moves. reading: chunks that are being read.
            writing: whether a copy to it, or its growth, is under way since the last reset.
            compute: seconds that the server takes to compute a chunk; 0 if not known.

        Returns:
            Log lines, and whether requests that wait for it are to stop waiting.
        """
        messages: list[LogLine] = []
        if reading or elapsed >= deadline:
            self._unhindered = now
        if not in_flight and self._calm:
            self._heard = False
            if compute <= 0 and not self.recompute.outpaced:
                return messages, False
            return messages, self._compare(now, compute, reading, None, messages)
        if self._faulty:
            self._faulty = {n: until for n, until in self._faulty.items() if until > now}
        if self._arrived:
            if elapsed < deadline:
                self._measure()
            self._arrived = 0
            self._measured = max(self._measured, self._arrived_by)
        heard = self._heard
        if heard or not (in_flight.rows or in_flight.asking):
            self._silent = 0.0
        else:
            self._silent += min(elapsed, deadline / 2)
        self._heard = False
        if self._silent >= 2 * deadline and not self.stalled:
            self.stalled = True
            text = (
                f"has not answered for {self._silent:.1f} s; "
                "its chunks are misses and nothing is stored there until it does"
            )
            messages.append(self._line("stalled", text, seconds=self._silent))
        if writing or self.slow:
            since = in_flight.since(Op.CASCADE, Op.GROW) if writing else None
            self._watch_writing(now, deadline, since, messages)
        # How long the first chunk took says little of how long a thousand take.
        measured = reading <= MOST_EXTRAPOLATED * self.pace.chunks
        self.congested = measured and reading * self.pace.per_chunk > max_wait
        # Moves that ended in this step count by their pace, and may still have to be taken in.
        since = in_flight.since(Op.PROMOTE) if reading and not heard else None
        if since is not None:
            since = max(since, self._measured)
        gives_up = self._compare(now, compute, reading, since, messages)
        return messages, gives_up

    def _measure(self) -> None:
        seconds = max(0.0, self._arrived_by - max(self._arrived_since, self._measured))
        if self.recompute.outpaced:
            # The cause of its slowness may be over.
            self.pace.replace(self._arrived, seconds)
        else:
            self.pace.add(self._arrived, seconds)

    def _compare(
        self, now: float, compute: float, reading: int, since: float | None, messages: list[LogLine]
    ) -> bool:
        recompute, read = self.recompute, self.pace.per_chunk
        before = recompute.outpaced
        gives_up = recompute.watch(now, self.pace, compute, reading, since)
        if recompute.outpaced and not before:
            took = f"{read * 1e3:.1f} ms" if read > compute else "longer than that"
            text = (
                f"is outpaced: the server computes a chunk in {compute * 1e3:.1f} ms, "
                f"reading one takes {took}; its chunks are misses"
            )
            messages.append(self._line("outpaced", text, compute_seconds=compute))
        elif before and not recompute.outpaced:
            messages.append(self._line("not_outpaced", "is faster than computing again"))
        self._sum_up()
        return gives_up

    def _sum_up(self) -> None:
        unused = self.closed or self.stalled or self.congested
        self.alive = not unused and self.calls.closed
        self.readable = self.alive and not self.recompute.avoided

    @property
    def _calm(self) -> bool:
        """Whether nothing was wrong, and nothing has arrived in this step."""
        return not (
            self._arrived
            or self._faulty
            or self._silent
            or self.slow
            or self.stalled
            or self.congested
        )

    def _watch_writing(
        self, now: float, deadline: float, since: float | None, messages: list[LogLine]
    ) -> None:
        lasts = 0.0 if since is None else now - max(since, self._unhindered)
        if self._silent < deadline and lasts >= 2 * deadline:
            self._slow_since = now
            if not self.slow:
                self.slow = True
                text = (
                    f"is slow: it has been writing for {lasts:.1f} s; "
                    "chunks that find no room are not stored there"
                )
                messages.append(self._line("slow", text, seconds=lasts))
        elif self.slow and now - self._slow_since >= SLOW_PAUSE:
            self.slow = False
            messages.append(self._line("not_slow", "is not slow any more"))

    def _line(self, event: str, text: str, **about: float | str | None) -> LogLine:
        named = {"tier": self._name, **about}
        return LogLine(f"tier.{event}", f"tier {self._name} {text}", named)
