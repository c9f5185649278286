"""A digest of the weights in memory: any change of any word is another digest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from kvstore.vllm.weights import PIECE, LiveWeights, digest_of_worker


class Model(torch.nn.Module):
    """Weights of several kinds and sizes, one of them odd, one longer than a piece."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            values = torch.randn(*shape, generator=generator).to(dtype)
            return torch.nn.Parameter(values, requires_grad=False)

        self.odd = weight(7, 3)
        self.short = weight(64, 64)
        self.long = weight(PIECE + 5, dtype=torch.float64)
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.packed = torch.nn.Parameter(torch.arange(100, dtype=torch.uint8), requires_grad=False)
        self.strided = torch.nn.Parameter(weight(16, 32).t(), requires_grad=False)
        self.register_buffer("table", torch.arange(9.0))


def worker(model: Model, drafter: Model | None = None) -> Any:
    draft = SimpleNamespace(model=drafter) if drafter is not None else None
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model, drafter=draft))


def test_equal_weights_have_equal_digests_wherever_they_lie() -> None:
    assert digest_of_worker(worker(Model())) == digest_of_worker(worker(Model()))


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("odd", (0, 0)),
        ("odd", (6, 2)),
        ("short", (63, 63)),
        ("long", (0,)),
        ("long", (PIECE - 1,)),
        ("long", (PIECE + 4,)),
        ("scale", ()),
        ("packed", (99,)),
        ("strided", (1, 15)),
        ("table", (8,)),
    ],
)
def test_one_value_that_changes_in_its_last_bit_is_noticed(
    name: str, index: tuple[int, ...]
) -> None:
    model = Model()
    before = digest_of_worker(worker(model))
    tensor = getattr(model, name).data
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor.view(kind[tensor.element_size()])[index] ^= 1
    assert digest_of_worker(worker(model)) != before


def test_values_that_change_places_are_noticed() -> None:
    model = Model()
    before = digest_of_worker(worker(model))
    model.long.data[:16] = model.long.data[:16].flip(0).clone()
    assert digest_of_worker(worker(model)) != before


def test_the_weights_of_a_model_that_drafts_count() -> None:
    digests = {digest_of_worker(worker(Model(), draft)) for draft in (None, Model(), Model(seed=1))}
    assert len(digests) == 3


class Executor:
    """Asks two workers, or fails."""

    def __init__(self) -> None:
        self.models = [Model(0), Model(1)]
        self.broken = False

    def collective_rpc(self, method: Any) -> list[Any]:
        if self.broken:
            raise RuntimeError("a worker is gone")
        return [method(worker(model)) for model in self.models]


def test_a_change_on_any_worker_counts_once() -> None:
    executor = Executor()
    weights = LiveWeights(executor)
    assert not weights.changed()
    executor.models[1].short.data[0, 0] += 1
    assert weights.changed()
    assert not weights.changed()


def test_weights_that_cannot_be_read_are_others() -> None:
    executor = Executor()
    weights = LiveWeights(executor)
    executor.broken = True
    assert weights.changed()
    executor.broken = False
    assert weights.changed(), "nobody knows what came between"
    assert not weights.changed()


def test_weights_that_cannot_be_read_at_the_start_are_not_known() -> None:
    executor = Executor()
    executor.broken = True
    assert not LiveWeights(executor).known
