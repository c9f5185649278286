"""The lists of addresses that a kernel reads, on their way to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from kvstore.device.cuda_driver import Copier
from kvstore.device.fragments import Fragments, Longs

__all__ = ["MOST", "Lists"]

MOST = 16 * 1024
"""Pieces in a list, at most: 384 KiB."""


class Lists:
    """Sends lists to the device, for one stream.

    There is one list on the device: the stream copies the next one there after the kernel that
    reads this one. In host memory a list stays until the device has fetched it. It lies in pinned
    memory, which torch keeps and hands out again: a copy from other memory makes the caller wait.
    """

    def __init__(self, device: torch.device, cuda: Any, calls: Copier) -> None:
        self._cuda = cuda
        self._calls = calls
        self._pinned = device.type == "cuda"
        self._there = torch.empty(3 * MOST, dtype=torch.int64, device=device)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(
        self, targets: Longs, sources: Longs, sizes: Longs, stream: Any
    ) -> tuple[torch.Tensor, int]:
        """Queue the copy of a list of `MOST` pieces at most.

        Returns:
            targets, sources and sizes one after the other, on the device, for what is queued on
            `stream` until the next call; and the driver's error, 0 for none.
        """
        length = 3 * len(sizes)
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()
        here = torch.empty(length, dtype=torch.int64, pin_memory=self._pinned)
        np.concatenate((targets, sources, sizes), out=here.numpy())
        whole = Fragments(
            *(
                np.array([number], np.int64)
                for number in (self._there.data_ptr(), here.data_ptr(), 8 * length, 0)
            )
        )
        error = self._calls.copy(whole, stream.cuda_stream, store=False, way="each", step=1)
        fetched = self._cuda.Event()
        fetched.record(stream)
        self._sent.append((fetched, here))
        return self._there, error
