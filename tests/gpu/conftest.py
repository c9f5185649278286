from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.bed import Bed


@pytest.fixture(params=["pretended", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "pretended":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device: copies on a real one were not run")
    return "cuda"


@pytest.fixture
def beds() -> Iterator[list[Bed]]:
    made: list[Bed] = []
    yield made
    for bed in made:
        bed.close()
