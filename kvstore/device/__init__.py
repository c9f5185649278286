"""Copies between the paged KV cache of a device and rows of host memory. Needs torch."""

from kvstore.device.cuda import CudaCopies, Ticket
from kvstore.device.host import HostCopies
from kvstore.device.layout import Pages, pages_of

__all__ = ["CudaCopies", "HostCopies", "Pages", "Ticket", "pages_of"]
