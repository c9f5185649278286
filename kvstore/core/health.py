"""Whether a tier is worth asking and worth writing to.

It is told what the tier's moves have done and, once a step, what is left to do and
the time. It only gives answers; its callers act on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvstore.core.in_flight import InFlight

__all__ = ["DEVICE_PAUSE", "SLOW_PAUSE", "STORE_PAUSE", "Health"]

STORE_PAUSE = 5.0
"""Seconds without new copies to a tier after a copy to it failed."""

SLOW_PAUSE = 30.0
"""Seconds without a slow move after which a tier is not slow any more."""

DEVICE_PAUSE = 30.0
"""Seconds for which a device that failed to store is passed over while others do not."""


class Health:
    """What is known of how one tier does.

    Attributes:
        readable: whether a promotion from it is worth waiting for: it is neither of the next two.
        stalled: nothing came back for longer than two deadlines: its chunks are misses.
        congested: what is asked of it already takes longer than anybody would wait.
        slow: it answers, but copies to it or its growth took seconds of late.
        seconds_per_chunk: measured pace of promotions; 0 until the first has ended.
        store_after: no copy to it is begun before this time; 0 when the last copy went well.

    Args:
        name: the tier's, for messages.
        devices: how many it has.
    """

    def __init__(self, name: str, devices: int = 1) -> None:
        self._name = name
        self._devices = devices
        self._faulty: dict[int, float] = {}
        self.readable = True
        self.stalled = self.congested = self.slow = False
        self.seconds_per_chunk = 0.0
        self.store_after = 0.0
        self._heard = False
        # Seconds, as far as anybody watched, for which it has not answered.
        self._silent = 0.0
        # Chunks promoted in this step, when the first of their moves was begun, and up to
        # when the pace was measured.
        self._arrived = 0
        self._arrived_since = 0.0
        self._measured = 0.0
        self._slow_since = 0.0
        # Since when copies were held up neither by reads, which go first, nor by a slow caller.
        self._unhindered = 0.0

    def accepts(self, now: float) -> bool:
        """Whether it is worth copying anything to it."""
        return not self.stalled and now >= self.store_after

    @property
    def cautious(self) -> bool:
        """Whether the last copy to it failed: one chunk is to try before many."""
        return self.store_after > 0.0

    @property
    def passed_over(self) -> Collection[int]:
        """Devices that failed to store a short while ago; none when all of them did."""
        return () if self.ailing else self._faulty

    @property
    def ailing(self) -> bool:
        """Whether every device failed to store a short while ago."""
        return len(self._faulty) == self._devices

    def heard(self) -> None:
        """A move has ended; its completion may be taken in later."""
        self._heard = True

    def answered(self) -> str | None:
        """The end of a move was taken in. Returns a line for the log, if there is one."""
        self._heard = True
        if not self.stalled:
            return None
        self.stalled = False
        self.readable = not self.congested
        return f"tier {self._name} answers again"

    def arrived(self, chunks: int, started: float) -> None:
        """The promotion of so many chunks, begun at `started`, has ended."""
        self._arrived_since = min(self._arrived_since, started) if self._arrived else started
        self._arrived += chunks

    def stored(self, devices: Iterable[int]) -> None:
        """Copies to these devices went well."""
        if self._faulty:
            for device in devices:
                self._faulty.pop(device, None)

    def refused(self, devices: Iterable[int], now: float) -> None:
        """Copies to these devices failed: they are passed over for a while, or all wait."""
        for device in devices:
            self._faulty[device] = now + DEVICE_PAUSE
        if self.ailing:
            self.store_after = now + STORE_PAUSE

    def recovered(self, now: float) -> bool:
        """A copy went well; whether that ends a pause after one that failed."""
        if not self.store_after or now < self.store_after:
            return False
        self.store_after = 0.0
        return True

    def watch(
        self,
        now: float,
        elapsed: float,
        deadline: float,
        max_wait: float,
        in_flight: InFlight,
        reading: int,
        writing: bool,
    ) -> list[str]:
        """Bring everything up to date, once a step.

        When the step before lies further back than `deadline`, `elapsed` says
        more of the caller than of the tier.

        Args:
            in_flight: its moves. reading: chunks that are being read.
            writing: whether a copy to it or its growth is under way that no reset has overtaken.

        Returns:
            Lines for the log.
        """
        if reading or elapsed >= deadline:
            self._unhindered = now
        if not in_flight and self._calm:
            self._heard = False
            return []
        if self._faulty:
            self._faulty = {n: until for n, until in self._faulty.items() if until > now}
        if self._arrived:
            if elapsed < deadline:
                pace = (now - max(self._arrived_since, self._measured)) / self._arrived
                old = self.seconds_per_chunk
                self.seconds_per_chunk = pace if not old else 0.8 * old + 0.2 * pace
            self._arrived = 0
            self._measured = now
        if self._heard or not in_flight.rows:
            self._silent = 0.0
        else:
            self._silent += min(elapsed, deadline / 2)
        self._heard = False
        messages: list[str] = []
        if self._silent >= 2 * deadline and not self.stalled:
            self.stalled = True
            messages.append(
                f"tier {self._name} has not answered for {self._silent:.1f} s; "
                "its chunks are misses and nothing is stored there until it does"
            )
        if writing or self.slow:
            self._watch_writing(
                now, deadline, in_flight.writing_since if writing else None, messages
            )
        self.congested = reading * self.seconds_per_chunk > max_wait
        self.readable = not self.stalled and not self.congested
        return messages

    @property
    def _calm(self) -> bool:
        """Whether nothing was amiss."""
        return not (
            self._arrived
            or self._faulty
            or self._silent
            or self.slow
            or self.stalled
            or self.congested
        )

    def _watch_writing(
        self, now: float, deadline: float, since: float | None, messages: list[str]
    ) -> None:
        lasts = 0.0 if since is None else now - max(since, self._unhindered)
        if self._silent < deadline and lasts >= 2 * deadline:
            self._slow_since = now
            if not self.slow:
                self.slow = True
                messages.append(
                    f"tier {self._name} is slow: it has been writing for {lasts:.1f} s; "
                    "what finds no room is not stored there"
                )
        elif self.slow and now - self._slow_since >= SLOW_PAUSE:
            self.slow = False
            messages.append(f"tier {self._name} is not slow any more")
