"""Where bytes live: host memory and slower tiers, one place per medium."""

from tiers.base import Tier, Transfer
from tiers.pinned import PinnedRegion

__all__ = ["PinnedRegion", "Tier", "Transfer"]
