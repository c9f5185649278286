"""Everything below starts real engines; without vLLM it is skipped, and says so."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

from tests.vllm.engines import ONE_PROCESS, Run, run_engine

LENGTH = 1024
PROMPTS = [[seed, LENGTH] for seed in range(8)]
SHORT = [[seed, 512] for seed in range(200, 208)]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.vllm)
    if importlib.util.find_spec("vllm") is None:
        item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """A spec that is built makes kvstore log as vLLM does; other tests shall not notice."""
    logger = logging.getLogger("kvstore")
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(before[0])
    logger.handlers[:], logger.propagate = before[1:]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same prompts on an engine without offload."""
    return run_engine(
        tmp_path_factory.mktemp("reference"),
        {
            "engine": {"num_gpu_blocks_override": 600},
            "rounds": [
                {"name": "each", "prompts": PROMPTS},
                {"name": "long", "prompts": [[100, 2 * LENGTH]]},
                {"name": "short", "prompts": SHORT, "together": True},
            ],
        },
        ONE_PROCESS,
    )
