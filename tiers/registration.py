"""Registration: pin memory for CUDA, so that a device copies at full speed.

All of it or nothing: where CUDA refuses a part, what was registered before is taken back
and the memory stays usable, by slow copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from typing import Any, Protocol

from kvstore.types import about

__all__ = ["CudaRuntime", "Registration", "Runtime", "cuda_runtime"]

logger = logging.getLogger("kvstore.host")

STEP_BYTES = 64 * 1024**3
"""Recent drivers refuse more than 512 GiB in one call."""

_HOST_POINTER_FOR_REGISTERED_MEMORY = 91


class Runtime(Protocol):
    """What is needed of CUDA. Codes are those of ``cudaError_t``; 0 is success."""

    def register(self, address: int, size: int) -> int:
        """Pin memory."""
        ...

    def unregister(self, address: int) -> int:
        """Unpin what was pinned at `address`."""
        ...

    def drain(self) -> None:
        """Clear the pending error: the next caller to check would take it for its own."""
        ...

    def kernels_read_host(self) -> bool:
        """Whether kernels may use the host's addresses of registered memory."""
        ...


class Registration:
    """Registered memory.

    Attributes:
        kernels_read: kernels of the device may read it by its address in this process.
    """

    def __init__(self, runtime: Runtime, addresses: list[int], kernels_read: bool) -> None:
        self._runtime = runtime
        self._addresses = addresses
        self.kernels_read = kernels_read

    @classmethod
    def of(cls, runtime: Runtime, address: int, rows: int, stride: int) -> Registration | None:
        """Register rows in steps that end where rows end, so that no copy of a row lies in two.

        Args:
            stride: bytes from the beginning of a row to that of the next.

        Returns:
            None if CUDA refuses; why and what it means is in the log.
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
                    "unpinned, copies to and from the device will be slow",
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
                "the device's copy engine does all copies",
                extra=about("host.kernels_cannot_read"),
            )
        return registration

    def end(self) -> None:
        """Unregister all. What fails is logged and costs the rest nothing."""
        while self._addresses:
            address = self._addresses.pop()
            code = _checked(self._runtime.unregister, address)
            if code:
                self._runtime.drain()
                logger.warning(
                    "CUDA could not unpin host memory at %#x (error %d): it stays pinned as long "
                    "as this process lives",
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


class CudaRuntime:
    """The CUDA runtime that torch uses.

    Args:
        torch: the module.
        library: the runtime's own library, for what torch does not show; None where torch
            has it built in.
    """

    def __init__(self, torch: Any, library: Any) -> None:
        self._torch = torch
        self._library = library
        self._cudart = torch.cuda.cudart()

    def register(self, address: int, size: int) -> int:
        return int(self._cudart.cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))

    def drain(self) -> None:
        if self._library is not None:
            self._library.cudaGetLastError()
            return
        # torch looks for an error when it has started a kernel, raises it and forgets it.
        with contextlib.suppress(RuntimeError):
            self._torch.zeros(1, device="cuda")

    def kernels_read_host(self) -> bool:
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


def cuda_runtime() -> CudaRuntime | None:
    """The runtime of this process; None where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    return CudaRuntime(torch, _loaded_library("/proc/self/maps"))


def _loaded_library(maps: str) -> Any:
    """The runtime that is loaded already: another copy of it would have errors of its own."""
    with contextlib.suppress(OSError), open(maps) as lines:
        for line in lines:
            path = line.rstrip().partition("/")
            if "libcudart" in path[2].rpartition("/")[2]:
                return ctypes.CDLL("/" + path[2])
    return None
