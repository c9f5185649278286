"""A KV cache twice, once on a device, and rows for either."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.device import CudaCopies, HostCopies, Pages, pages_of
from kvstore.tiers.pinned import PinnedRegion
from tests.gpu.pretend import PretendCuda, PretendDriver

__all__ = ["BLOCKS", "PLACES", "ROWS", "Bed"]

ROWS = 12
BLOCKS = 24
PLACES = DeviceLoadStoreSpec([1, 3, 5, 7]), HostLoadStoreSpec([1, 2])
"""Blocks and rows of a bed with two blocks in a row, no two of them neighbours."""


class Bed:
    """The same KV cache on a device and in host memory, and rows for either."""

    def __init__(
        self,
        device: str,
        *,
        per_chunk: int = 2,
        groups: int = 1,
        page: int = 30,
        pinned: bool = True,
        seed: int = 0,
        has_batch: bool = True,
    ) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.device = device
        self.per_chunk = per_chunk
        self.tensors: list[Any] = []
        self.copied: list[Any] = []
        here: list[list[Pages]] = []
        there: list[list[Pages]] = []
        for group in range(groups):
            here.append([])
            there.append([])
            shapes = ((BLOCKS, 2, page // 2), 0), ((2, BLOCKS, page // 2 + group), 1)
            for shape, dim in shapes:
                tensor = torch.randint(0, 255, shape, dtype=torch.uint8, generator=dice)
                copied = tensor.clone() if device == "cpu" else tensor.to(device)
                self.tensors.append(tensor)
                self.copied.append(copied)
                here[-1] += pages_of(tensor, dim)
                there[-1] += pages_of(copied, dim)
        width = max(sum(pages.size for pages in tables) for tables in here) * per_chunk
        self.region = PinnedRegion.private(ROWS, -(-width // 4096) * 4096)
        if device == "cuda" and pinned:
            self.region.register_with_cuda()
            assert self.region.registered
        self.rows = np.zeros_like(self.region.array)
        self.host = HostCopies(here, self.rows, per_chunk)
        self.cuda: Any = torch.cuda
        self.calls: PretendDriver | None = None
        if device == "cpu":
            self.cuda = PretendCuda()
            self.calls = PretendDriver(self.cuda, has_batch=has_batch)
        self.copies = CudaCopies(
            there, self.region.array, per_chunk, cuda=self.cuda, calls=self.calls
        )

    def same(self) -> bool:
        """Whether device and rows hold what host memory says."""
        tensors = all(
            torch.equal(one, other.cpu())
            for one, other in zip(self.tensors, self.copied, strict=True)
        )
        return tensors and bool((self.rows == self.region.array).all())

    def places(self, dice: random.Random) -> tuple[DeviceLoadStoreSpec, HostLoadStoreSpec]:
        """Any blocks of any groups, and rows for them."""
        groups = len(self.host._groups)
        sizes = [dice.randint(0, 6) for _ in range(groups)]
        firsts = [dice.randint(0, 9) for _ in range(groups)]
        chunks = sum(
            -(-(first % self.per_chunk + size) // self.per_chunk) if size else 0
            for first, size in zip(firsts, sizes, strict=True)
        )
        if chunks > ROWS:
            return self.places(dice)
        if dice.random() < 0.5:
            begin = dice.randrange(BLOCKS - sum(sizes) + 1)
            blocks = list(range(begin, begin + sum(sizes)))
        else:
            blocks = dice.sample(range(BLOCKS), sum(sizes))
        rows = dice.sample(range(ROWS), chunks)
        return DeviceLoadStoreSpec(blocks, sizes, firsts), HostLoadStoreSpec(rows)

    def close(self) -> None:
        self.copies.shutdown()
        self.region.close()
