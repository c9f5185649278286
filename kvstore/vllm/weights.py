"""Weights: check that an engine still computes with those that it started with.

An engine that sleeps, or pauses to take new weights, asks its connector to forget everything. What
is kept outside of the device is as right as before, unless the weights have become others. vLLM
does not say; so the workers tell a digest of the weights in memory, at the start and when the
engine goes on: the metadata of a step asks for it, and it comes with the output of that step. Until
then nothing is served or stored.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from kvstore.types import about

__all__ = ["LiveWeights", "WeightsUnreadableError", "digest_of_worker"]

logger = logging.getLogger("kvstore")

PIECE = 2**19
"""Words of 8 bytes that are summed up at once: memory of the device is scarce."""

PROBED = 256
"""Rows of a packed weight that are read at once."""

PROBE_S = 15.0
"""So long packed weights may take to be read; then they are unknown."""

PATIENCE_S = 60.0
"""So long digests may take that the scheduler has ordered; then the weights are unknown."""


class WeightsUnreadableError(Exception):
    """Nobody can tell whether weights in memory have changed."""


class LiveWeights:
    """The digests of the weights in use: see the module's text.

    Attributes:
        look: number of the last look at the weights that was asked for; 0 if there was none.

    Args:
        known: the digests that the workers told at the start; None for one that could not.
        moving: EPLB moves weights between workers, so that no digest says anything.
    """

    def __init__(self, known: Sequence[str | None], *, moving: bool = False) -> None:
        self.look = 0
        self._workers = len(known)
        self._known = None if moving else self._whole(known)
        # What could not be read at the start is not tried again, which takes its time.
        self._readable = self._known is not None
        # What the workers have told in the last look.
        self._told: dict[int, str | None] = {}
        self._until = 0.0
        if moving:
            logger.info(
                "EPLB moves weights between workers, so it is unknown whether they have "
                "changed: tiers are used until the first reset or pause",
                extra=about("weights.moving"),
            )

    def ask(self) -> None:
        """Begin a look; an earlier one is dropped."""
        self._told = {}
        if self._readable:
            self.look += 1
            self._until = time.monotonic() + PATIENCE_S

    def told(self, look: int, digests: Mapping[int, str | None]) -> None:
        """Take in the digests of some workers, by rank."""
        if look == self.look:
            self._told.update(digests)

    @property
    def missing(self) -> bool:
        """Whether a worker has not told its digest in this look."""
        return self._readable and len(self._told) < self._workers

    def same(self) -> bool | None:
        """Whether the weights are those of the look before; None while the workers have not told.

        False, too, if they cannot be read or the workers take too long.
        """
        missing = self.missing
        if missing and time.monotonic() < self._until:
            return None
        if missing:
            logger.warning(
                "the workers have not told their weights within %g s: they count as others",
                PATIENCE_S,
                extra=about("weights.late"),
            )
        before, self._known = self._known, None
        if self._readable and not missing:
            self._known = self._whole([self._told[rank] for rank in sorted(self._told)])
        return before is not None and self._known == before

    def _whole(self, digests: Sequence[str | None]) -> list[str] | None:
        known = [digest for digest in digests if digest is not None]
        return known if known and len(known) == self._workers else None


def digest_of_worker(worker: Any) -> str:
    """A digest of all weights of a worker; each of them, and the place of each word, counts.

    Raises:
        WeightsUnreadableError: if some are where they cannot be read, or not soon enough.
    """
    runner = worker.model_runner
    # A model that drafts tokens has KV of its own.
    models = [runner.get_model(), getattr(runner, "get_draft_model", lambda: None)()]
    digest = hashlib.sha256()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    until = time.monotonic() + PROBE_S
    for number, model in enumerate(models):
        for name, tensor in _tensors(model, until):
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


def _tensors(model: Any, until: float) -> Iterator[tuple[str, torch.Tensor]]:
    if model is not None:
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                yield name, tensor
        packed = {name: module for name, module in model.named_modules() if _is_packed(module)}
        left = sum(_width(module) or 0 for module in packed.values())
        for name, module in packed.items():
            for tensor in _unpacked(name, module, until, left):
                yield f"{name} packed", tensor
            left -= _width(module) or 0


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is not among its parameters any more.

    Some kernels take it over when it has been loaded: all those for unquantised linear layers on
    the CPU do.
    """
    own = dict(module.named_parameters(recurse=False))
    if not isinstance(module, LinearBase):
        return "weight" in own and not own["weight"].numel()
    wide = getattr(module, "input_size_per_partition", module.input_size)
    high = getattr(module, "output_size_per_partition", module.output_size)
    held = sum(one.numel() * one.element_size() for one in own.values())
    # Less than a bit for each weight: only its bias or its scales are left.
    return bool(8 * held < wide * high)


def _held(module: torch.nn.Module) -> list[Any]:
    """What the kernel of a linear layer holds."""
    kernel = getattr(module, "cpu_linear", None)
    return [cell.cell_contents for cell in getattr(kernel, "__closure__", None) or ()]


def _width(module: torch.nn.Module) -> int | None:
    """Rows of a weight that is read through its kernel; None if it is read otherwise."""
    return next((int(one.k) for one in _held(module) if hasattr(one, "handler_tensor")), None)


def _unpacked(
    name: str, module: torch.nn.Module, until: float, left: int
) -> Iterator[torch.Tensor]:
    """What the kernel for a linear layer holds, or the weight in rows, read through it.

    The product with a row of the unit matrix is a row of the weight, exactly.

    Args:
        left: rows that are still to be read so, of all layers.
    """
    tensors = [one for one in _held(module) if isinstance(one, torch.Tensor)]
    if tensors:
        yield from tensors
        return
    wide = _width(module)
    if wide is None:
        raise WeightsUnreadableError(f"the weight of {name} is packed, and cannot be read")
    began = time.monotonic()
    for start in range(0, wide, PROBED):
        now = time.monotonic()
        # Far too many are given up at once.
        if now > until or (start and (now - began) / start * left > 4 * PROBE_S):
            raise WeightsUnreadableError(f"packed weights are not read within {PROBE_S:g} s")
        rows = torch.arange(start, min(start + PROBED, wide))
        units = torch.zeros(len(rows), wide, dtype=module.weight.dtype)
        units[torch.arange(len(rows)), rows] = 1
        yield module.cpu_linear(units, module.weight, None)


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
