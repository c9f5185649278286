"""Whether the weights that an engine computes with are those that it started with.

An engine that sleeps, or pauses to take new weights, asks its connector to forget everything. What
is kept outside of the device is as right as before, unless the weights have become others. vLLM
does not say; so the workers tell a digest of the weights in memory, at the start and when the
engine goes on.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvstore.types import about

__all__ = ["LiveWeights", "digest_of_worker"]

logger = logging.getLogger("kvstore")

PIECE = 2**19
"""Words of 8 bytes that are summed up at once: memory of the device is scarce."""


class LiveWeights:
    """See the module's text.

    Args:
        executor: of the engine, held weakly; it asks all workers.
    """

    def __init__(self, executor: Any) -> None:
        self._executor: Callable[[], Any] = weakref.ref(executor)
        self._known = self._take()

    @property
    def known(self) -> bool:
        """Whether the weights of the start could be read."""
        return self._known is not None

    def changed(self) -> bool:
        """Whether they are others than at the last look, or cannot be read."""
        before, self._known = self._known, self._take()
        return before is None or self._known != before

    def _take(self) -> list[str] | None:
        executor = self._executor()
        if executor is None:
            return None
        began = time.monotonic()
        try:
            digests: list[str] = executor.collective_rpc(digest_of_worker)
        except Exception:
            logger.exception(
                "the weights in memory cannot be read: no pause keeps the cache",
                extra=about("weights.unreadable"),
            )
            return None
        logger.info(
            "the weights in memory were read in %.2f s",
            time.monotonic() - began,
            extra=about("weights.read"),
        )
        return digests


def digest_of_worker(worker: Any) -> str:
    """A digest of all weights of a worker; each of them, and the place of each word, counts."""
    runner = worker.model_runner
    # A model that drafts tokens has KV of its own.
    models = [runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None)]
    digest = hashlib.sha256()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    for number, model in enumerate(models):
        for name, tensor in _tensors(model):
            digest.update(f"{number} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            device = tensor.device
            if device not in factors:
                factors[device] = 2 * torch.arange(PIECE, dtype=torch.int64, device=device) + 1
            sums.setdefault(device, []).extend(_sums(tensor, factors[device]))
    for its in sums.values():
        # One wait for all that a device has summed up.
        digest.update(torch.stack(its).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if model is not None:
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                yield name, tensor


def _sums(tensor: torch.Tensor, factors: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each piece of the tensor a sum of its words, each times an odd number of its place."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    words = data[:whole].view(torch.int64) if data.data_ptr() % 8 == 0 else None
    if words is None:
        words = data[:whole].clone().view(torch.int64)
    for piece in words.split(PIECE):
        yield (piece * factors[: len(piece)]).sum()
    if len(data) > whole:
        yield (data[whole:].to(torch.int64) * factors[: len(data) - whole]).sum()
