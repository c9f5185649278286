"""Generation beside a store that is smaller than the prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore

pytest.importorskip("transformers")

from examples.http_server.cache import PromptCache
from examples.http_server.generation import Generation, Generator
from examples.http_server.model import Model, Shape, Token


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(Shape(layers=2, hidden=64, context=2048), 16)


@pytest.mark.parametrize(("disk", "wanted"), [(False, 2), (True, 16)])
async def test_prompts_wider_than_host_memory_are_answered_and_saved_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    tmp_path: Path,
    disk: bool,
    wanted: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config: dict[str, Any] = {
        "cpu_bytes_to_use": 4 * model.chunk_bytes,
        "chunk_bytes": model.chunk_bytes,
        "identity": {},
    }
    if disk:
        config["tiers"] = [{"type": "disk", "path": tmp_path, "capacity_bytes": "64MiB"}]
    prompt = [place % 256 for place in range(8 * 16 + 3)]
    passes: list[int] = []
    real = model.feed

    def counted(past: Any, tokens: Sequence[int]) -> Token:
        passes.append(len(tokens))
        return real(past, tokens)

    monkeypatch.setattr(model, "feed", counted)
    with caplog.at_level(logging.WARNING):
        async with kvstore.open(config) as store:
            generator = Generator(model, PromptCache(store))
            answers = []
            for _ in range(3):
                passes.clear()
                tokens = Generation(generator, prompt, wanted).tokens()
                answers.append([token.id async for token in tokens])
                while generator._saving:
                    await asyncio.wait(generator._saving)
            await generator.close()
    assert answers[0] == answers[1] == answers[2]
    assert "nothing is saved" not in caplog.text
    # The answer's chunk is known to be saved, or there is none: nothing is computed after it.
    assert passes[1 - wanted :] == [1] * (wanted - 1)
