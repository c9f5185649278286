"""Remote tiers: stores that several hosts share."""

from kvstore.tiers.remote.client import StoreClient, StoreError
from kvstore.tiers.remote.tier import StoreTier

__all__ = ["StoreClient", "StoreError", "StoreTier"]
