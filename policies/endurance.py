"""Endurance: a budget for bytes written to a disk."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.admission import AdmissionFilter

__all__ = ["EnduranceBudget"]

_DAY = 86_400.0


class EnduranceBudget(AdmissionFilter):
    """Admits as many bytes per day as the disk is to endure: a token bucket.

    The budget fills evenly and can be saved up for `burst_s` seconds, at least for
    one chunk; it begins full. Over any time t no more is admitted than
    t / 86400 x `bytes_per_day`, and once what can be saved up. Of a run of keys the
    first are admitted.

    Args:
        bytes_per_day: 0 for as many as the tier holds, one full write per day.
        burst_s: seconds, at least 0.
    """

    name = "endurance"
    spends = True

    def __init__(
        self, capacity: int, chunk_bytes: int, *, bytes_per_day: int = 0, burst_s: float = 3600.0
    ) -> None:
        super().__init__(capacity, chunk_bytes)
        if bytes_per_day < 0:
            raise ValueError(f"bytes_per_day must be at least 0, not {bytes_per_day}")
        if not 0 <= burst_s < float("inf"):
            raise ValueError(f"burst_s must be at least 0 seconds, not {burst_s}")
        self.bytes_per_day = bytes_per_day or capacity * chunk_bytes
        self._rate = self.bytes_per_day / _DAY
        self._most = max(float(chunk_bytes), self._rate * burst_s)
        self._left = self._most
        self._now: float | None = None

    def asked(self, keys: Sequence[bytes]) -> None:
        """What was asked for does not matter here."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        if self._now is not None:
            self._left = min(self._most, self._left + (now - self._now) * self._rate)
        self._now = now
        affordable = min(len(keys), int(self._left / self.chunk_bytes))
        self._left -= affordable * self.chunk_bytes
        return [True] * affordable + [False] * (len(keys) - affordable)

    def clear(self) -> None:
        """What was written stays written: nothing is forgotten."""
