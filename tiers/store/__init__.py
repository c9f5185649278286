"""Stores: tiers over remote engines that exist, which several hosts share."""

from kvstore.tiers.store.client import StoreClient, StoreError
from kvstore.tiers.store.tier import StoreTier

__all__ = ["StoreClient", "StoreError", "StoreTier"]
