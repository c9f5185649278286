"""Tiers: host memory and slower media, one module or folder each."""

# Imported under two names, the package would exist twice.
if __name__ != "kvstore.tiers":
    raise ImportError(f"import kvstore.tiers, not {__name__}")

from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.pinned import PinnedRegion

__all__ = ["PinnedRegion", "Tier", "Transfer"]
