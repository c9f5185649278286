"""Registration: pin memory for CUDA, so that a device copies at full speed.

All or nothing: if CUDA refuses a part, the rest is unregistered, and the memory stays usable with
slow copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from typing import Any

from kvstore.types import about

__all__ = ["CudaRuntime", "Registration", "cuda_runtime"]

logger = logging.getLogger("kvstore.host")

STEP_BYTES = 64 * 1024**3
"""Bytes registered in one call; recent drivers refuse more than 512 GiB."""

_HOST_POINTER_FOR_REGISTERED_MEMORY = 91


class CudaRuntime:
    """The CUDA runtime that torch uses. Codes are those of ``cudaError_t``; 0 is success.

    Args:
        torch: the module.
        library: the runtime's library, for calls that torch does not expose; None if it is
            linked into torch.
    """

    def __init__(self, torch: Any, library: Any) -> None:
        self._torch = torch
        self._library = library
        self._cudart = torch.cuda.cudart()

    def register(self, address: int, size: int) -> int:
        """Pin memory."""
        return int(self._cudart.cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> int:
        """Unpin the memory that was pinned at `address`."""
        return int(self._cudart.cudaHostUnregister(address))

    def drain(self) -> None:
        """Clear the pending error, which the next checked call would otherwise report."""
        if self._library is not None:
            self._library.cudaGetLastError()
            return
        # torch checks for an error after starting a kernel; raising it clears it.
        with contextlib.suppress(RuntimeError):
            self._torch.zeros(1, device="cuda")

    def kernels_read_host(self) -> bool:
        """Whether kernels may use the host's addresses of registered memory."""
        if self._library is None:
            return True
        value = ctypes.c_int(1)
        device = int(self._torch.cuda.current_device())
        code = self._library.cudaDeviceGetAttribute(
            ctypes.byref(value), _HOST_POINTER_FOR_REGISTERED_MEMORY, device
        )
        if code:
            self.drain()
            return True
        return bool(value.value)


class Registration:
    """Memory that is registered with CUDA.

    Attributes:
        kernels_read: whether kernels may use its addresses in this process.
    """

    def __init__(self, runtime: CudaRuntime, addresses: list[int], kernels_read: bool) -> None:
        self._runtime = runtime
        self._addresses = addresses
        self.kernels_read = kernels_read

    @classmethod
    def of(cls, runtime: CudaRuntime, address: int, rows: int, stride: int) -> Registration | None:
        """Register rows in steps of whole rows, so that no copy of a row spans two registrations.

        Args:
            stride: bytes from the beginning of a row to that of the next.

        Returns:
            None if CUDA refuses, which is logged.
        """
        size = rows * stride
        step = max(1, STEP_BYTES // stride) * stride
        registration = cls(runtime, [], runtime.kernels_read_host())
        started = time.perf_counter()
        for offset in range(0, size, step):
            part = min(step, size - offset)
            code = _checked(runtime.register, address + offset, part)
            if code:
                runtime.drain()
                registration.end()
                logger.warning(
                    "CUDA refuses to pin bytes %d to %d of %d of host memory (error %d): it stays "
                    "unpinned, and copies to and from the device will be slow",
                    offset,
                    offset + part,
                    size,
                    code,
                    extra=about("host.not_pinned", error=code),
                )
                return None
            registration._addresses.append(address + offset)
        seconds = time.perf_counter() - started
        logger.info(
            "pinned %.2f GB of host memory in %.2f s (%.1f GB/s, %d steps)",
            size / 1e9,
            seconds,
            size / 1e9 / max(seconds, 1e-9),
            len(registration._addresses),
            extra=about("host.pinned", bytes=size, seconds=seconds),
        )
        if not registration.kernels_read:
            logger.warning(
                "kernels cannot read pinned host memory on this system (as on WSL2): "
                "the device's copy engine makes all copies",
                extra=about("host.kernels_cannot_read"),
            )
        return registration

    def end(self) -> None:
        """Unregister all memory. A failure is logged, and the rest is still unregistered."""
        while self._addresses:
            address = self._addresses.pop()
            code = _checked(self._runtime.unregister, address)
            if code:
                self._runtime.drain()
                logger.warning(
                    "CUDA could not unpin host memory at %#x (error %d): it stays pinned until "
                    "this process ends",
                    address,
                    code,
                    extra=about("host.not_unpinned", error=code),
                )


def _checked(call: Any, *arguments: int) -> int:
    try:
        return int(call(*arguments))
    except Exception:
        logger.exception("a call of the CUDA runtime failed", extra=about("host.cuda_failed"))
        return -1


def cuda_runtime() -> CudaRuntime | None:
    """Return the runtime of this process; None if there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    return CudaRuntime(torch, _loaded_library("/proc/self/maps"))


def _loaded_library(maps: str) -> Any:
    """Return the runtime that is already loaded; another copy would have its own error state."""
    with contextlib.suppress(OSError), open(maps) as lines:
        for line in lines:
            path = line.rstrip().partition("/")
            if "libcudart" in path[2].rpartition("/")[2]:
                return ctypes.CDLL("/" + path[2])
    return None
