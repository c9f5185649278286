"""A digest of the weights in memory: any change of any word is another digest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from kvstore.vllm.weights import PIECE, LiveWeights, WeightsUnreadableError, digest_of_worker


class Model(torch.nn.Module):  # type: ignore[misc]
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


def worker(model: Any, drafter: Model | None = None) -> Any:
    runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafter)
    return SimpleNamespace(model_runner=runner)


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


def packed(weight: torch.Tensor, *, skipped: bool = False) -> Model:
    """A model whose linear layer vLLM has packed for the CPU."""
    model = Model()
    model.linear = torch.nn.Module()
    model.linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(model.linear, remove_weight=True)
    if model.linear.weight.numel() and weight.dtype == torch.bfloat16:
        pytest.skip("this processor computes with bfloat16 as it is")
    assert not model.linear.weight.numel(), "it is not in the model's state any more"
    if skipped:
        del model.linear.cpu_linear
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 512), (16, 128), (300, 700)])
def test_each_weight_of_a_layer_that_a_kernel_has_packed_counts(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digest_of_worker(worker(packed(weight)))
    assert digest_of_worker(worker(packed(weight))) == before
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for place in ((0, 0), (shape[0] // 2, shape[1] // 3), (shape[0] - 1, shape[1] - 1)):
        changed = weight.clone()
        changed.view(bits)[place] ^= 1
        assert digest_of_worker(worker(packed(changed))) != before


def test_weights_that_cannot_be_read_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(64, 64)
    with pytest.raises(WeightsUnreadableError, match="of linear is packed, and cannot be read"):
        digest_of_worker(worker(packed(weight, skipped=True)))
    monkeypatch.setattr("kvstore.vllm.weights.PROBE_S", -1.0)
    with pytest.raises(WeightsUnreadableError, match="not read within"):
        digest_of_worker(worker(packed(weight)))


def test_values_that_change_places_are_noticed() -> None:
    model = Model()
    before = digest_of_worker(worker(model))
    model.long.data[:16] = model.long.data[:16].flip(0).clone()
    assert digest_of_worker(worker(model)) != before


def test_the_weights_of_a_model_that_drafts_count() -> None:
    digests = {digest_of_worker(worker(Model(), draft)) for draft in (None, Model(), Model(seed=1))}
    assert len(digests) == 3


class Workers:
    """Two workers, whose digests come when a step's output is there."""

    def __init__(self, *, moving: bool = False, broken: bool = False) -> None:
        self.models = [Model(0), Model(1)]
        self.broken = broken
        self.live = LiveWeights(list(self.digests().values()), moving=moving)

    def digests(self) -> dict[int, str | None]:
        """Of each worker; of one that is broken None."""
        digests = [digest_of_worker(worker(model)) for model in self.models]
        return {n: None if self.broken and n else digest for n, digest in enumerate(digests)}

    def step(self, look: int | None = None) -> None:
        self.live.told(self.live.look if look is None else look, self.digests())

    def same(self) -> bool | None:
        self.live.ask()
        self.step()
        return self.live.same()


def test_a_change_on_any_worker_counts_once() -> None:
    workers = Workers()
    assert workers.same()
    workers.models[1].short.data[0, 0] += 1
    assert workers.same() is False
    assert workers.same()


def test_weights_that_cannot_be_read_are_others() -> None:
    workers = Workers()
    workers.broken = True
    assert workers.same() is False
    workers.broken = False
    assert workers.same() is False, "nobody knows what came between"
    assert workers.same()


def test_weights_that_cannot_be_read_at_the_start_are_not_known() -> None:
    workers = Workers(broken=True)
    workers.broken = False
    assert workers.same() is False


def test_an_answer_counts_when_all_workers_have_told_and_only_for_the_last_look() -> None:
    workers = Workers()
    workers.live.ask()
    workers.live.ask()
    workers.step(look=1)
    assert workers.live.same() is None
    workers.live.told(2, {1: workers.digests()[1]})
    assert workers.live.same() is None
    workers.live.told(2, {0: workers.digests()[0]})
    assert workers.live.same()


def test_nobody_waits_for_workers_and_after_a_while_the_weights_are_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers()
    monkeypatch.setattr("kvstore.vllm.weights.PATIENCE_S", 0.0)
    workers.live.ask()
    assert workers.live.same() is False
    assert "have not told" in caplog.text
    assert workers.same() is False
    assert workers.same()


def test_with_eplb_the_weights_are_never_read(caplog: pytest.LogCaptureFixture) -> None:
    """It moves experts between workers, so any look would find others."""
    with caplog.at_level(logging.INFO, "kvstore"):
        workers = Workers(moving=True)
    assert "EPLB" in caplog.text
    assert workers.same() is False
    assert workers.live.look == 0


class Copies(TorchDispatchMode):  # type: ignore[misc]
    """The largest tensor that is made anew, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, made.numel() * made.element_size())
        return made


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda data: data.t(),
    "padded": lambda data: data[:, :-8],
    "transposed and padded": lambda data: data[:, :-8].t(),
    "one row for all": lambda data: data[:1].expand(len(data), -1),
    "every other": lambda data: data.view(1, -1)[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_weights_in_any_order_are_read_without_a_copy_of_more_than_a_piece(name: str) -> None:
    view = VIEWS[name](torch.arange(4096 * 4096, dtype=torch.int32).view(4096, 4096))
    with Copies() as copies:
        before = digest_of(view)
    assert copies.largest <= 8 * PIECE
    view[0, 9] += 1
    assert digest_of(view) != before


def digest_of(tensor: torch.Tensor) -> str:
    model = torch.nn.Module()
    model.register_buffer("weight", tensor)
    return digest_of_worker(worker(model))
