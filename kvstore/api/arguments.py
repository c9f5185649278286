"""Check the arguments of the library's calls; errors name the argument that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized, ValuesView
from itertools import islice, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import BlockKeyError, KVStoreError
from kvstore.types import MAX_KEY_BYTES, check_key

__all__ = [
    "bytes_of",
    "check_keys",
    "check_request",
    "check_seconds",
    "check_timeout",
    "chunks_of",
    "targets_of",
]

_ONE_THING = (str, bytes, bytearray, memoryview)
_BYTES = {bytes}


def check_keys(keys: Sequence[bytes]) -> list[bytes]:
    """`keys` as a list of good keys of its own, which nobody else changes during a call.

    Raises:
        BlockKeyError: for anything that is not a sequence of keys.
    """
    if isinstance(keys, _ONE_THING) or not isinstance(keys, Sequence):
        raise BlockKeyError(f"keys must be a list or another sequence of bytes, not {_kind(keys)}")
    keys = list(keys)
    # Built-in functions walk over the keys: there may be many of them.
    if set(map(type, keys)) <= _BYTES:
        lengths = set(map(len, keys))
        if not lengths or (min(lengths) and max(lengths) <= MAX_KEY_BYTES):
            return keys
    for key in keys:
        check_key(key)
    return keys


def check_request(request: str | None) -> str | None:
    """`request` unchanged.

    Raises:
        KVStoreError: if it is no name.
    """
    if request is None or isinstance(request, str):
        return request
    raise KVStoreError(f"request must be a name (str) or None, not {_kind(request)}")


def check_timeout(timeout: float | None) -> float | None:
    """`timeout` in seconds; None if it is forever.

    Raises:
        KVStoreError: if it is no number of seconds.
    """
    if timeout is None or (
        isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout == timeout
    ):
        try:
            return timeout if timeout is None else float(timeout)
        except OverflowError as error:
            raise KVStoreError("timeout must be seconds or None, not a number that big") from error
    raise KVStoreError(f"timeout must be seconds or None, not {timeout!r}")


def check_seconds(seconds: float) -> float:
    """`seconds` as a length of time; it may be infinite.

    Raises:
        KVStoreError: if it is none.
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise KVStoreError(f"seconds must be a number above 0, not {seconds!r:.40}")
    try:
        return float(seconds)
    except OverflowError:
        return float("inf")


def chunks_of(buffers: Iterable[object], count: int, size: int) -> list[npt.NDArray[np.uint8]]:
    """The bytes of `count` buffers of `size` bytes each.

    Raises:
        KVStoreError: for another number of buffers, one that is no chunk, or an iterable, not a
            sequence, that gives the same memory again and again.
    """
    taken = _each_of(buffers, "chunks", count, lambda buffer: bytes_of(buffer, size))
    held = isinstance(buffers, (ValuesView, repeat)) or hasattr(buffers, "__getitem__")
    if not held and _overlap(filter(_may_change, taken), size):
        raise KVStoreError(
            "two of the buffers are the same memory: all are gathered before one is copied, "
            "so each chunk needs its own"
        )
    return taken


def targets_of(buffers: Iterable[object], count: int, size: int) -> list[npt.NDArray[np.uint8]]:
    """The memory of `count` buffers of `size` bytes each, to be written to.

    Raises:
        KVStoreError: for another number of buffers, one that cannot be written to in place, or
            two that share memory.
    """
    taken = _each_of(buffers, "buffers", count, lambda buffer: _memory_of(buffer, size))
    if _overlap(taken, size):
        raise KVStoreError("two of the buffers to write to share memory")
    return taken


def _each_of(
    buffers: Iterable[object],
    what: str,
    count: int,
    take: Callable[[object], npt.NDArray[np.uint8]],
) -> list[npt.NDArray[np.uint8]]:
    try:
        each = iter(buffers)
    except TypeError as error:
        raise KVStoreError(
            f"buffers must be a list or another iterable of {what}, not {_kind(buffers)}"
        ) from error
    taken = [take(buffer) for buffer in islice(each, count + 1)]
    if len(taken) != count:
        many = len(buffers) if isinstance(buffers, Sized) else "more"
        given = many if len(taken) > count else len(taken)
        raise KVStoreError(f"{count} keys but {given} buffers")
    return taken


def _may_change(array: npt.NDArray[np.uint8]) -> bool:
    """Whether somebody can write to the memory of an array."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    return not (base is None or isinstance(base, bytes))


def _overlap(arrays: Iterable[npt.NDArray[np.uint8]], size: int) -> bool:
    return any(after - before < size for before, after in pairwise(sorted(map(_address, arrays))))


def _address(array: npt.NDArray[np.uint8]) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def _is_tensor(value: object) -> bool:
    return hasattr(value, "detach") and hasattr(value, "untyped_storage")


def bytes_of(buffer: object, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of one chunk, copied only where they do not lie side by side.

    Raises:
        KVStoreError: if it has no bytes of its own, or not `size` of them.
    """
    flat: npt.NDArray[np.uint8]
    try:
        if _is_tensor(buffer):
            import torch

            if not isinstance(buffer, torch.Tensor):
                raise TypeError("it looks like a tensor and is none")
            flat = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(buffer, np.ndarray):
            flat = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
        else:
            flat = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]
    except (TypeError, ValueError, AttributeError, BufferError, ImportError, RuntimeError) as error:
        raise KVStoreError(
            f"a chunk must be a buffer, an array or a tensor with bytes of its own, not this "
            f"{type(buffer).__name__} ({error})"
        ) from error
    if flat.size != size:
        raise KVStoreError(f"a chunk must have {size} bytes, not {flat.size}")
    return flat


def _memory_of(buffer: object, size: int) -> npt.NDArray[np.uint8]:
    flat = bytes_of(buffer, size)
    place = flat.ctypes.data
    if hasattr(buffer, "untyped_storage"):
        tensor: Any = buffer
        same = tensor.device.type == "cpu" and place == tensor.data_ptr()
    elif isinstance(buffer, np.ndarray):
        same = place == buffer.ctypes.data
    else:
        same = True
    if not same or not flat.flags.writeable:
        why = "is read-only" if same else "does not lie side by side in this machine's memory"
        raise KVStoreError(f"a buffer to write to {why}: {type(buffer).__name__}")
    return flat


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} ({value!r:.40})"
