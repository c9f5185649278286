"""The scheduler's half of a connector."""

from kvstore.connector.scheduler.scheduler import ConnectorScheduler
from kvstore.connector.scheduler.stats import ConnectorStats, EndedLoads

__all__ = ["ConnectorScheduler", "ConnectorStats", "EndedLoads"]
