"""Endurance: a budget for bytes written to a disk."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.admission import AdmissionFilter

__all__ = ["EnduranceBudget"]

_DAY = 86_400.0
_MOST_BYTES, _LONGEST = 2**60, 365 * _DAY


class EnduranceBudget(AdmissionFilter):
    """Limits the bytes per day of chunks that are stored, with a token bucket.

    The bucket fills evenly, begins full and holds the budget of `burst_s` seconds,
    but at least one chunk. Over t seconds at most t / 86400 * `bytes_per_day`, plus
    one full bucket, is admitted. Of a list of keys the first are admitted.

    Args:
        bytes_per_day: 0 for the capacity of the tier, which is one full write per day.
        burst_s: seconds, at least 0.
    """

    name = "endurance"
    spends = True

    def __init__(
        self, capacity: int, chunk_bytes: int, *, bytes_per_day: int = 0, burst_s: float = 3600.0
    ) -> None:
        super().__init__(capacity, chunk_bytes)
        if not 0 <= bytes_per_day <= _MOST_BYTES:
            raise ValueError(f"bytes_per_day must be from 0 to 2**60, not {bytes_per_day}")
        if not 0 <= burst_s <= _LONGEST:
            raise ValueError(f"burst_s must be from 0 to {_LONGEST:.0f} seconds, not {burst_s}")
        self.bytes_per_day = bytes_per_day or capacity * chunk_bytes
        self._rate = self.bytes_per_day / _DAY
        self._most = max(float(chunk_bytes), self._rate * burst_s)
        self._left = self._most
        self._now: float | None = None

    def asked(self, keys: Sequence[bytes]) -> None:
        """Do nothing: lookups do not matter here."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        if self._now is not None:
            self._left = min(self._most, self._left + (now - self._now) * self._rate)
        self._now = now
        affordable = min(len(keys), int(self._left / self.chunk_bytes))
        self._left -= affordable * self.chunk_bytes
        return [True] * affordable + [False] * (len(keys) - affordable)

    def clear(self) -> None:
        """Do nothing: the spent budget stays spent."""
