"""The disk tier: segments, slots, records, recovery."""

from tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
