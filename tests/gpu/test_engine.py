"""The paged engine on a CUDA device gives the tokens that it gives in host memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("examples.paged_engine")

from examples.paged_engine.engine import Engine  # noqa: E402
from examples.paged_engine.model import ModelConfig  # noqa: E402
from tests.examples.test_paged_engine import (  # noqa: E402
    MODEL,
    WINDOWED,
    offload,
    serve,
    stream_for,
    tiny,
)


@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["full", "windowed"])
def test_every_token_is_the_same_on_a_device(model: ModelConfig, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device: the engine was not run on one")
    stream = stream_for(model, 300)
    there = dataclasses.replace(model, device="cuda")
    engine = Engine(tiny(there, offload=offload(tmp_path)))
    assert serve(engine, stream, resets=0.005).wrong == []
    assert engine.connector is not None
    assert engine.connector.stats.loads > 50
    engine.settle()
    engine.shutdown()
