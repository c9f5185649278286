"""Two data parallel engines behind one server, over one path: each finds what the other stored."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from benchmarks.serving.servers import Server, offload
from examples.rounds import prompt
from examples.tiny_model import CONFIG, write_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LENGTH = 1024
PROMPTS = 8
Answer = tuple[list[int], int]
"""Tokens, and how many tokens of the prompt were not computed."""


async def ask(server: Server) -> list[Answer]:
    """Each prompt alone."""
    answers: list[Answer] = []
    async with aiohttp.ClientSession() as session:
        for seed in range(PROMPTS):
            asked = {
                "model": "tiny",
                "prompt": [token % CONFIG["vocab_size"] for token in prompt(seed, LENGTH)],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with session.post(f"{server.url}/v1/completions", json=asked) as response:
                told = await response.json()
            details = told["usage"].get("prompt_tokens_details") or {}
            answers.append((told["choices"][0]["token_ids"], details.get("cached_tokens") or 0))
    return answers


def serve(folder: Path, name: str) -> tuple[list[Answer], str]:
    """A server from its start to its end: its answers, and its metrics before the end."""
    extra = offload("kvstore", 2**27, 2**30, folder / "cache")
    server = Server(
        name,
        folder / "model",
        folder / f"{name}.log",
        extra,
        device_blocks=72,
        max_tokens=2048,
        more=("--data-parallel-size", "2"),
    )
    try:
        server.wait_until_up()
        answers = asyncio.run(ask(server))
        server.wait_until_idle()
        return answers, server.metrics()
    finally:
        server.stop()


def test_engines_find_what_the_other_has_stored_after_a_restart(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    first, _ = serve(tmp_path, "first")
    second, metrics = serve(tmp_path, "second")
    assert [cached for _, cached in first] == [0] * PROMPTS, "computed, all of it"
    assert [cached for _, cached in second] == [LENGTH] * PROMPTS
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
    loaded = re.findall(r'kvstore_loaded_tier_chunks_total\{engine="(\d)".* (\S+)$', metrics, re.M)
    assert {engine for engine, chunks in loaded if float(chunks)} == {"0", "1"}
    log = (tmp_path / "second.log").read_text()
    # vLLM does not tell the first engine of a model without experts that it is one of several.
    assert f"data parallel engine 1 takes {2**27} bytes of host memory" in log
