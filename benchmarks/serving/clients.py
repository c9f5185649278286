"""Clients with conversations: each turn sends all that was said before, and some more."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from examples.rounds import prompt

__all__ = ["Answer", "Talk", "Turn", "ask", "hold", "said", "shares"]

VOCABULARY = 8000


@dataclass(frozen=True, slots=True)
class Talk:
    """What a round of a setting asks for.

    Attributes:
        clients: requests that may be under way at once.
        conversations: each of which belongs to one client.
        turns: of every conversation.
        first: tokens of the first prompt.
        grows: tokens that each later turn adds, the answer before it included.
        reply: tokens of an answer.
        think: mean seconds before a client's next request.
    """

    clients: int
    conversations: int
    turns: int
    first: int
    grows: int
    reply: int = 4
    think: float = 0.05

    @property
    def longest(self) -> int:
        """Tokens of the last prompt."""
        return self.first + (self.turns - 1) * self.grows


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered to one request."""

    first_token: float
    cached: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Turn:
    """Answers of one round, by conversation and turn."""

    seconds: float = 0.0
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)


def shares(talk: Talk) -> list[list[int]]:
    """The conversations of each client."""
    return [list(range(first, talk.conversations, talk.clients)) for first in range(talk.clients)]


async def hold(url: str, talk: Talk, seed: int) -> Turn:
    """Hold all conversations of a round with the server at `url`.

    A client goes through its conversations turn by turn: between two turns of one come
    the others. The same `seed` gives the same users, words and pauses.
    """
    done = Turn()
    connector = aiohttp.TCPConnector(limit=talk.clients)
    timeout = aiohttp.ClientTimeout(total=600)

    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def client(number: int, mine: list[int]) -> None:
            rng = random.Random(seed * 1009 + number)
            words = {one: said(seed, one, 0, talk.first) for one in mine}
            for turn in range(talk.turns):
                for one in mine:
                    await asyncio.sleep(rng.uniform(0, 2 * talk.think))
                    answer = await ask(session, words[one], talk.reply)
                    done.answers[one, turn] = answer
                    more = said(seed, one, turn + 1, talk.grows - talk.reply)
                    words[one] = [*words[one], *answer.tokens, *more]

        started = time.perf_counter()
        await asyncio.gather(*(client(*each) for each in enumerate(shares(talk))))
        done.seconds = time.perf_counter() - started
    return done


def said(seed: int, conversation: int, turn: int, length: int) -> list[int]:
    """What a user says, in token ids."""
    ids = prompt(hash((seed, conversation, turn)) % 2**31, length)
    return [10 + number % VOCABULARY for number in ids]


async def ask(
    session: aiohttp.ClientSession,
    ids: list[int],
    reply: int,
    hints: Mapping[str, Any] | None = None,
) -> Answer:
    """Send one prompt and read the answer token by token.

    Args:
        hints: what kvstore is to know of the conversation.

    Raises:
        RuntimeError: if the server refuses it, or ends early.
    """
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": reply,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if hints is not None:
        body["kv_transfer_params"] = {"kvstore": dict(hints)}
    tokens: list[int] = []
    first = cached = None
    started = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"the server answers {response.status}: {await response.text()}")
        async for line in response.content:
            text = line.decode().strip().removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            event = json.loads(text)
            for choice in event.get("choices", ()):
                if choice.get("token_ids"):
                    first = first or time.perf_counter() - started
                    tokens += choice["token_ids"]
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    if first is None or cached is None or len(tokens) != reply:
        raise RuntimeError(f"an answer of {len(tokens)} tokens instead of {reply}")
    return Answer(first, cached, tuple(tokens))
