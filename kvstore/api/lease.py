"""Leases: views of host memory that end with the lease.

A cancelled task cannot stop a thread that copies a chunk for it, and a tensor keeps only the
view object that it was made from. The rows of chunks whose views are still alive after the lease
stay pinned until the last buffer and the last view object are gone (`Onlookers`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.concurrency import Home
from kvstore.errors import KVStoreError, LeaseEndedError
from kvstore.policies.parameters import shown
from kvstore.sizes import format_size
from kvstore.types import about

if TYPE_CHECKING:
    import torch

__all__ = ["Chunks", "Lease", "Onlookers"]

logger = logging.getLogger("kvstore")


class Chunks(Sequence[memoryview]):
    """Leased chunks in host memory: read-only views that cannot be used after the lease.

    The views may be read in any thread, but the lease begins and ends on the
    store's loop. `array` and `tensor` give the same memory as an array or a tensor.

    Attributes:
        keys: the keys that were found: a prefix of those asked for.
        sources: for each key the medium from which it came to host memory: "host" for a chunk
            that was put and has been there since, else that of a tier, like "disk".
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        size: int,
        sources: Sequence[str] = (),
    ) -> None:
        self.keys = tuple(keys)
        self.sources = sources
        # Every chunk gets its own exporter, which lives as long as any buffer of the
        # chunk: a slice of its view, an array. Torch releases the buffer and keeps the view
        # object, so that is watched too: every access returns the same one.
        exporters = [(ctypes.c_ubyte * size).from_buffer(row) for row in rows]
        self._rows = rows
        self._exporters: list[weakref.ref[Any]] = [weakref.ref(each) for each in exporters]
        self._views: list[memoryview] | None = [
            memoryview(exporter).cast("B").toreadonly() for exporter in exporters
        ]
        self._watched: list[tuple[bytes, weakref.ref[Any]]] = []
        """Exporters and views that are still alive after the lease, with their chunks' keys."""

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if self._views is None:
            raise LeaseEndedError("these chunks were leased; the lease has ended")
        return self._views[index]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[memoryview]:
        for index in range(len(self)):
            yield self[index]

    def array(
        self, index: int, dtype: npt.DTypeLike, shape: int | Sequence[int] | None = None
    ) -> npt.NDArray[Any]:
        """Return one chunk as a read-only NumPy array over the same memory.

        Args:
            shape: of all elements of the chunk; by default they lie in a row.

        Raises:
            LeaseEndedError: if the lease has ended.
            KVStoreError: if the chunk has no whole number of elements, or another number of them.
        """
        view = self[operator.index(index)]
        try:
            flat: npt.NDArray[Any] = np.frombuffer(view, dtype)
            return flat if shape is None else flat.reshape(shape)
        except (TypeError, ValueError) as error:
            raise self._misfit(view.nbytes, dtype, shape) from error

    def tensor(
        self, index: int, dtype: torch.dtype, shape: int | Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return one chunk as a torch tensor on the CPU over the same memory.

        It must not be written to, which torch cannot prevent. Copies of it (``.to("cuda")``) are
        free of that.

        Args:
            shape: of all elements of the chunk; by default they lie in a row.

        Raises:
            LeaseEndedError: if the lease has ended.
            KVStoreError: if the chunk has no whole number of elements, or another number of them.
        """
        import torch

        size = self[operator.index(index)].nbytes
        try:
            # Torch warns of views that are read-only. It keeps this one, which keeps the exporter.
            view = memoryview(self._exporters[index]()).cast("B")  # type: ignore[arg-type]
            flat = torch.frombuffer(view, dtype=dtype)
            return flat if shape is None else flat.reshape(shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._misfit(size, dtype, shape) from error

    def _misfit(self, size: int, dtype: object, shape: object) -> KVStoreError:
        form = "" if shape is None else f" in the shape {shown(shape)}"
        if isinstance(dtype, str) and "float" in dtype:
            # Text is a name of NumPy's, which has no kinds of its own for models.
            form += "; for a dtype of torch, such as torch.bfloat16, take `tensor`"
        return KVStoreError(f"a chunk of {size} bytes is not of {dtype}{form}")

    def __repr__(self) -> str:
        if self._views is None:
            return f"<Chunks: {len(self.keys)}, the lease has ended>"
        size = format_size(self._views[0].nbytes) if self._views else "0 B"
        return f"<Chunks: {len(self.keys)} of {size}>"

    def copy(self) -> list[bytes]:
        """Return the bytes of all chunks, for use after the lease.

        Raises:
            LeaseEndedError: if the lease has ended.
        """
        return [bytes(view) for view in self[:]]

    def _end(self) -> None:
        """End the lease."""
        views = self._let_go_of_views()
        keys, exporters = self.keys, self._exporters
        self._watched = [
            each for each in zip(keys, exporters, strict=True) if each[1]() is not None
        ]
        for key, reference, row in zip(keys, views, self._rows, strict=True):
            view = reference()
            if view is not None:
                self._watched.append((key, reference))
                # The row keeps the region's memory in place as long as the view is alive.
                weakref.finalize(view, _do_nothing, row).atexit = False
        self._rows = []

    def _let_go_of_views(self) -> list[weakref.ref[Any]]:
        """Release the views; returns weak references, which find those still in use elsewhere."""
        views, self._views = self._views or [], None
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()
        return [weakref.ref(view) for view in views]

    def looked_at(self) -> Iterator[tuple[bytes, object]]:
        """Yield the keys of chunks whose memory may be in use, with the object that keeps it.

        That is the exporter if a buffer is in use, and the view if its object is still alive, in
        a variable or in a tensor. To be called after the lease has ended.
        """
        for key, reference in self._watched:
            looked_at = reference()
            if looked_at is not None:
                yield key, looked_at


def _do_nothing(row: memoryview) -> None:
    """Do nothing: as a finalizer, keep the argument alive until then."""


class Lease:
    """The result of `Store.get`: leases chunks for the length of an ``async with`` block.

    Args:
        begin: finds and pins the chunks.
        end: takes the pins back.
    """

    def __init__(
        self, home: Home, begin: Callable[[], Awaitable[Chunks]], end: Callable[[Chunks], None]
    ) -> None:
        self._home = home
        self._begin: Callable[[], Awaitable[Chunks]] | None = begin
        self._end = end
        self._chunks: Chunks | None = None

    async def __aenter__(self) -> Chunks:
        self._home.check()
        begin, self._begin = self._begin, None
        if begin is None:
            raise KVStoreError("a lease can be begun once; call get again")
        self._chunks = await begin()
        return self._chunks

    async def __aexit__(self, *_: object) -> None:
        if not self._home.here:
            # The lease ends on the store's loop, and the caller gets an error.
            self.send_back()
            self._home.check()
        self.give_back()

    def __del__(self) -> None:
        if self._chunks is not None:
            # The lease was begun without `async with` and never ended.
            self.send_back()

    def give_back(self) -> None:
        """End the lease, on the store's loop."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks._end()  # noqa: SLF001
            self._end(chunks)

    def send_back(self) -> None:
        """End the lease soon. From any thread."""
        self._home.send(self.give_back)

    def drop(self) -> None:
        """End the lease of a store that has ended, as `give_back` does. From any thread."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks._end()  # noqa: SLF001

    def __repr__(self) -> str:
        if self._chunks is not None:
            return f"<Lease of {self._chunks!r}>"
        return "<Lease, not begun>" if self._begin is not None else "<Lease, ended>"


LINGER_SECONDS = 1.0
"""How long after its lease a view object without a known user may live before it is counted."""


class Onlookers:
    """The pins of chunks whose views outlive their lease. Belongs to the store's loop.

    Attributes:
        outlived: total of chunks still in use when their lease ended; a chunk of which only
            the view object is left counts after `LINGER_SECONDS`.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pins: Counter[tuple[int, bytes]] = Counter()
        """Pins that wait for the end of views, by the era of the lease and the key."""
        self.outlived = 0

    @property
    def rows(self) -> int:
        """Number of rows in use without a lease."""
        return len(self._pins)

    @property
    def keys(self) -> set[bytes]:
        """Keys of the chunks in use without a lease."""
        return {key for _, key in self._pins}

    def pins_before(self, era: int) -> int:
        """Return the number of pins that wait for views of leases from earlier eras."""
        return sum(count for (begun, _), count in self._pins.items() if begun < era)

    def see(self, chunks: Chunks, era: int, unpin: Callable[[bytes], None]) -> set[bytes]:
        """Watch the chunks of a lease that has ended; returns the keys of those still in use.

        Args:
            era: the era in which the lease began.
            unpin: takes back the pin of one of these; called on the loop once the chunk is not
                in use any more. It is not called if the loop has ended by then.
        """
        views: Counter[bytes] = Counter()
        used: set[bytes] = set()
        for key, looked_at in chunks.looked_at():
            views[key] += 1
            # A view whose buffer is not in use may only be the variable of a loop.
            if not isinstance(looked_at, memoryview):
                used.add(key)
            # Views die in any thread, wherever the last reference to them is dropped.
            gone = partial(self._home.send, partial(self._gone, key, era, views, unpin))
            weakref.finalize(looked_at, gone).atexit = False
        if views:
            self._pins.update((era, key) for key in views)
            self._count(len(used))
        if len(views) > len(used):
            unsure = set(views) - used
            self._home.loop.call_later(LINGER_SECONDS, self._still_there, views, unsure)
        return set(views)

    def _still_there(self, views: Counter[bytes], keys: Set[bytes]) -> None:
        self._count(sum(views[key] > 0 for key in keys))

    def _count(self, outlived: int) -> None:
        if outlived and not self.outlived:
            logger.warning(
                "an array, a tensor or a view of a leased chunk has outlived its lease: its row "
                "stays pinned until it is gone (told once; stats: outlived, watched_rows)",
                extra=about("lease.outlived"),
            )
        self.outlived += outlived

    def _gone(
        self, key: bytes, era: int, views: Counter[bytes], unpin: Callable[[bytes], None]
    ) -> None:
        """Count one view of the chunk less; unpin the chunk after the last."""
        views[key] -= 1
        if views[key]:
            return
        self._pins[era, key] -= 1
        if not self._pins[era, key]:
            del self._pins[era, key]
        unpin(key)
