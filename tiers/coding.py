"""Coding: the form that payloads have in a tier: encoded by a codec, sealed, or first one and then
the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

from kvstore.tiers.codec import Codec
from kvstore.tiers.pages import Scratch
from kvstore.tiers.sealing import Sealer

__all__ = ["Coder"]


class Coder:
    """Turns chunks into what is written, and back. Safe to use from several threads.

    Attributes:
        sealer: seals and opens payloads, where they are sealed.
        scratch: memory for payloads that are to be written.
        payload_bytes: of what is written.

    Args:
        codec: encodes and decodes them, where they are encoded.
        chunk_bytes: of a chunk in host memory.
    """

    def __init__(self, sealer: Sealer | None, codec: Codec | None, chunk_bytes: int) -> None:
        self.sealer = sealer
        self.scratch = Scratch()
        self._codec = codec
        self._chunk_bytes = chunk_bytes
        self.payload_bytes = chunk_bytes if codec is None else codec.coded_bytes(chunk_bytes)

    @classmethod
    def of(cls, sealer: Sealer | None, codec: Codec | None, chunk_bytes: int) -> Coder | None:
        """None where chunks are written as they are."""
        if sealer is None and codec is None:
            return None
        return cls(sealer, codec, chunk_bytes)

    def begun(self) -> Coder:
        """Return the coder for what begins to be written now: see `Sealer.begun`."""
        coder = copy(self)
        coder.sealer = None if self.sealer is None else self.sealer.begun()
        return coder

    def encode(self, key: bytes, epoch: int, row: memoryview, out: memoryview) -> bytes:
        """Write the payload of the chunk in `row` to `out`; returns its seal, if it has one."""
        payload = row[: self._chunk_bytes]
        if self._codec is not None:
            self._codec.encode(payload, out)
            payload = out[: self.payload_bytes]
        if self.sealer is not None:
            return self.sealer.seal(key, epoch, payload, out)
        return b""

    @contextmanager
    def encoded(
        self, keys: Sequence[bytes], rows: Sequence[memoryview]
    ) -> Iterator[tuple[list[memoryview], list[bytes]]]:
        """Lend the payloads of chunks of epoch 0, and their seals, for a block.

        Nothing may use the memory any more when the block ends.
        """
        size = self.payload_bytes
        memory = self.scratch.lend(size * len(rows))
        try:
            view = memoryview(memory)
            parts = [view[at * size : (at + 1) * size] for at in range(len(rows))]
            each = zip(keys, rows, parts, strict=True)
            yield parts, [self.encode(key, 0, row, part) for key, row, part in each]
        finally:
            self.scratch.take_back(memory)

    def decode(self, row: memoryview) -> None:
        """Turn a payload at the beginning of `row`, which has been opened, into the chunk."""
        if self._codec is not None:
            self._codec.decode(row, self._chunk_bytes)
