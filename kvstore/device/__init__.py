"""Copies between the paged KV cache of a device and rows of host memory. Needs torch."""

from kvstore.device.cuda import CudaCopies
from kvstore.device.host import HostCopies
from kvstore.device.layout import Pages, pages_of
from kvstore.device.stream import Ticket
from kvstore.device.ways import WAYS

__all__ = ["WAYS", "CudaCopies", "HostCopies", "Pages", "Ticket", "pages_of"]
