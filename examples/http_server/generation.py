"""From a prompt to tokens: load what is cached, compute the rest, save what is new."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import DynamicCache

from examples.http_server.cache import PromptCache, keys_of
from examples.http_server.model import Model, Tensors, Token

__all__ = ["Counts", "Generation", "Generator"]

logger = logging.getLogger("http_server")

MOST_RUNNING = 8
"""Requests that hold a KV cache at the same time; others wait."""

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """Totals since start, except `running` and `saving`: requests, and savings, now."""

    requests: int = 0
    running: int = 0
    saving: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Generator:
    """Generates for many requests, one pass of the model at a time.

    Args:
        model: only used in a thread of its own, so that the loop stays free.
        cache: None to compute everything.
    """

    def __init__(self, model: Model, cache: PromptCache | None) -> None:
        self.model = model
        self.cache = cache
        self.counts = Counts()
        self.places = asyncio.Semaphore(MOST_RUNNING)
        self._thread = ThreadPoolExecutor(1, "model")
        self._saving: set[asyncio.Task[None]] = set()

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do `work` in the thread of the model, after what was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def save(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do `work` while requests go on."""
        task = asyncio.get_running_loop().create_task(work)
        self._saving.add(task)
        self.counts.saving += 1
        task.add_done_callback(self._saved)
        return task

    async def close(self) -> None:
        """Wait until everything that was computed is saved."""
        while self._saving:
            await asyncio.wait(self._saving)
        self._thread.shutdown()

    def _saved(self, task: asyncio.Task[None]) -> None:
        self._saving.discard(task)
        self.counts.saving -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("nothing is saved", exc_info=error)


class Generation:
    """One request.

    Attributes:
        id: its name, in kvstore too.
        prompt: its tokens, at least one.
        cached_tokens: how many of them were not computed; known with the first token.
    """

    def __init__(self, generator: Generator, prompt: Sequence[int], max_tokens: int) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.prompt = list(prompt)
        self.cached_tokens = 0
        self._max_tokens = max_tokens
        self._generator = generator
        self._model = generator.model
        self._size = generator.model.chunk_tokens

    async def tokens(self) -> AsyncGenerator[Token]:
        """The most likely tokens, each as soon as it is known.

        When it is closed early or cancelled, the model does at most the pass that it is
        in, and no chunk stays leased. Nothing is leased while a token is handed out.
        """
        async with self._generator.places:
            counts = self._generator.counts
            counts.requests += 1
            counts.running += 1
            try:
                async with aclosing(self._tokens()) as tokens:
                    async for token in tokens:
                        counts.completion_tokens += 1
                        yield token
            finally:
                counts.running -= 1

    async def _tokens(self) -> AsyncGenerator[Token]:
        keys = keys_of(self.prompt, self._size)
        # What is saved is saved behind the tokens; the last of it releases the request.
        saving: asyncio.Task[None] | None = None
        tensors: Tensors = []
        answer: list[int] = []
        try:
            past = await self._load(keys)
            token = await self._prefill(past, self.prompt, self.cached_tokens)
            tensors = self._model.tensors(past)
            if self._generator.cache is not None:
                saving = self._generator.save(self._save(keys, tensors, self.cached_tokens))
            answer.append(token.id)
            yield token
            while len(answer) < self._max_tokens:
                token = await self._generator.run(self._model.feed, past, [token.id])
                answer.append(token.id)
                yield token
        finally:
            if self._generator.cache is not None:
                whole = len(answer) == self._max_tokens
                self._generator.save(self._end(saving, tensors, answer if whole else []))

    async def _load(self, keys: list[bytes]) -> DynamicCache:
        """A KV cache of the longest prefix; at least one token is left, for its logits."""
        counts, cache = self._generator.counts, self._generator.cache
        counts.prompt_tokens += len(self.prompt)
        if cache is None:
            return self._model.past()
        useful = keys[: (len(self.prompt) - 1) // self._size]
        count, past = await cache.load(self.id, useful, self._model.past)
        self.cached_tokens = count * self._size
        counts.cached_tokens += self.cached_tokens
        return past

    async def _prefill(self, past: DynamicCache, tokens: Sequence[int], start: int) -> Token:
        """Compute `tokens` from `start` on, the beginning of a chunk; the next one is returned."""
        for begin in range(start, len(tokens), self._size):
            piece = tokens[begin : begin + self._size]
            token = await self._generator.run(self._model.feed, past, piece)
        return token

    async def _save(self, keys: Sequence[bytes], tensors: Tensors, start: int) -> None:
        """Save the chunks of `tensors` from the token `start` on."""
        assert self._generator.cache is not None
        first = start // self._size
        chunks = partial(self._model.chunks, tensors, first, len(keys))
        # Those that wait hold a KV cache each.
        wait = self._generator.counts.saving <= MOST_RUNNING
        await self._generator.cache.save(self.id, keys[first:], chunks, wait=wait)

    async def _end(
        self, saving: asyncio.Task[None] | None, tensors: Tensors, answer: list[int]
    ) -> None:
        """Save the chunks that `answer` has filled, and release the request."""
        cache = self._generator.cache
        assert cache is not None
        try:
            if saving is not None:
                await asyncio.wait({saving})
            start = len(self.prompt) // self._size * self._size
            tokens = self.prompt + answer
            keys = keys_of(tokens, self._size)
            if answer and len(keys) * self._size > start and cache.held(keys) < len(keys):
                # Computed token by token it has other bits than a prompt would have.
                past = await self._generator.run(self._model.beginning, tensors, start)
                await self._prefill(past, tokens[: len(keys) * self._size], start)
                await self._save(keys, self._model.tensors(past), start)
        finally:
            cache.release(self.id)
