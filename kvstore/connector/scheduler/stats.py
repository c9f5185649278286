"""What the scheduler's half tells of its work."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.connector.mediums import ConnectorOutput

__all__ = ["ConnectorStats", "EndedLoads"]


@dataclass(slots=True)
class EndedLoads:
    """Requests whose loads have ended.

    Attributes:
        loaded: their tokens are in their blocks.
        failed: what was to be loaded has to be computed.
    """

    loaded: list[str]
    failed: list[str]


@dataclass(slots=True)
class ConnectorStats:
    """Counters since the beginning.

    Attributes:
        loads, stores: transfers that were begun.
        failed_loads, failed_stores: those that did not succeed.
        refused_stores: stores that found no room, each time they were offered.
        deferred: lookups that were to be asked again.
        matched_tokens: tokens of the loads that were begun.
        loaded_bytes, stored_bytes, loading_seconds, storing_seconds: of all workers together.
        unknown_jobs: ends of transfers that were reported and not under way.
    """

    loads: int = 0
    stores: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    refused_stores: int = 0
    deferred: int = 0
    matched_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    loading_seconds: float = 0.0
    storing_seconds: float = 0.0
    unknown_jobs: int = 0

    def count_copies(self, output: ConnectorOutput) -> None:
        """What workers have copied."""
        self.loaded_bytes += output.loaded.bytes
        self.stored_bytes += output.stored.bytes
        self.loading_seconds += output.loaded.seconds
        self.storing_seconds += output.stored.seconds
