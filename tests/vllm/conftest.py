"""Everything below starts real engines; without vLLM it is skipped, and says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.vllm.engines import Run, run_engine

HERE = Path(__file__).parent
PROMPTS = [[seed, 2048] for seed in range(8)]
SHORT = [[seed, 512] for seed in range(200, 208)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # One worker runs them all: engines share fixtures, and two at once fight for cores.
            item.add_marker(pytest.mark.xdist_group("vllm"))
            if not have_vllm:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same prompts on an engine without offload."""
    return run_engine(
        tmp_path_factory.mktemp("reference"),
        {
            "engine": {"num_gpu_blocks_override": 600},
            "rounds": [
                {"name": "each", "prompts": PROMPTS},
                {"name": "together", "prompts": PROMPTS, "together": True},
                {"name": "long", "prompts": [[100, 4096]]},
                {"name": "short", "prompts": SHORT, "together": True},
            ],
        },
    )
