"""Stores: tiers over remote engines that exist, which several hosts share."""

from tiers.store.client import StoreClient, StoreError
from tiers.store.tier import StoreTier

__all__ = ["StoreClient", "StoreError", "StoreTier"]
