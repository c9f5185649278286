"""Weights: check that an engine still computes with those that it started with.

An engine that sleeps, or pauses to take new weights, asks its connector to forget everything. What
is kept outside of the device is as right as before, unless the weights have become others. vLLM
does not say; so the workers tell a digest of the weights in memory, at the start and when the
engine goes on.

At the start the engine waits for them. Later it does not: a call of the scheduler requests the
digests, they come with the output of the next step, and until then nothing is served or stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from kvstore.types import about

__all__ = ["LiveWeights", "digest_of_worker"]

logger = logging.getLogger("kvstore")

PIECE = 2**19
"""Words of 8 bytes that are summed up at once: memory of the device is scarce."""

PATIENCE_S = 60.0
"""So long digests may take that the scheduler has ordered; then the weights are unknown."""

Digests = list[tuple[str, float]]
"""Of each worker, and the seconds that it took."""


class LiveWeights:
    """The digests of the weights in use: see the module's text.

    Args:
        executor: the engine's, held weakly; it asks all workers.
    """

    def __init__(self, executor: Any) -> None:
        self._executor: Callable[[], Any] = weakref.ref(executor)
        self._known: list[str] | None = None
        self._asked: Future[Digests] | None = None
        self._until = 0.0
        parallel = getattr(executor, "parallel_config", None)
        self._readable = not getattr(parallel, "enable_eplb", False)
        if not self._readable:
            logger.info(
                "EPLB moves weights between workers, so it is unknown whether they have "
                "changed: tiers are used until the first reset or pause",
                extra=about("weights.moving"),
            )
            return
        self.ask()
        if self._asked is not None:
            with contextlib.suppress(Exception):
                self._asked.result()
            # Later there is no wait, so an answer must say by itself whether it has arrived.
            self._readable = self._asked.done()
        self._known = self._answer()

    def ask(self) -> None:
        """Request the digests; an earlier request is dropped."""
        executor = self._executor()
        self._asked = None
        if executor is None or not self._readable:
            return
        self._until = time.monotonic() + PATIENCE_S
        try:
            self._asked = executor.collective_rpc(_timed_digest, non_block=True)
        except Exception as error:
            self._asked = Future()
            self._asked.set_exception(error)

    def same(self) -> bool | None:
        """Whether the weights are those of the look before; None while the workers have not told.

        False, too, if they cannot be read or the workers take too long.
        """
        if self._asked is not None and not self._asked.done() and time.monotonic() < self._until:
            return None
        before, self._known = self._known, self._answer()
        return before is not None and self._known == before

    def _answer(self) -> list[str] | None:
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        try:
            if not asked.done():
                raise TimeoutError("the workers have not told them in time")
            told = asked.result()
        except Exception:
            logger.exception(
                "the weights in memory cannot be read: no pause keeps the cache, and slower tiers "
                "are not used after it",
                extra=about("weights.unreadable"),
            )
            return None
        logger.info(
            "the weights in memory were read in %.2f s",
            max(seconds for _, seconds in told),
            extra=about("weights.read"),
        )
        return [digest for digest, _ in told]


def _timed_digest(worker: Any) -> tuple[str, float]:
    began = time.monotonic()
    return digest_of_worker(worker), time.monotonic() - began


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
            shape = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
            digest.update(f"{number} {name} {shape}\n".encode())
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
    for dense in _dense(tensor.detach()):
        data = dense.view(-1).view(torch.uint8)
        whole = len(data) // 8 * 8
        for piece in data[:whole].split(8 * PIECE):
            aligned = piece if piece.data_ptr() % 8 == 0 else piece.clone()
            words = aligned.view(torch.int64)
            yield (words * factors[: len(words)]).sum()
        if len(data) > whole:
            yield (data[whole:].to(torch.int64) * factors[: len(data) - whole]).sum()


def _dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in contiguous parts, of which no more than a piece is copied at a time."""
    if not tensor.is_contiguous():
        # One that was transposed is contiguous in the order of its strides.
        order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
        tensor = tensor.permute(order)
    if tensor.is_contiguous():
        yield tensor
    elif tensor.numel() * tensor.element_size() <= 8 * PIECE:
        yield tensor.contiguous()
    elif len(tensor) == 1:
        yield from _dense(tensor[0])
    else:
        row = tensor[0].numel() * tensor.element_size()
        for part in tensor.split(max(1, 8 * PIECE // row)):
            yield from _dense(part)
