"""Copies between the paged KV cache of a device and rows of host memory. Needs torch."""

from kvstore.device.host import HostCopies
from kvstore.device.pages import Pages, pages_of

__all__ = ["HostCopies", "Pages", "pages_of"]
