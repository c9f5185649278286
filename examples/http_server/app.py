"""The HTTP routes. The store is opened when the server starts and closed when it stops."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import kvstore
from examples.http_server import metrics, tokenizer
from examples.http_server.cache import PromptCache
from examples.http_server.completion import (
    BadRequestError,
    Completion,
    body_of,
    error_of,
    usage_of,
)
from examples.http_server.generation import Generation, Generator
from examples.http_server.model import Model

__all__ = ["App"]

DONE = b"data: [DONE]\n\n"


class App:
    """The application.

    Args:
        model: what generates.
        config: of the store; None to compute everything.
    """

    def __init__(self, model: Model, config: kvstore.Config | None) -> None:
        self._model = model
        self._config = config
        self._store: kvstore.Store | None = None
        self._generator: Generator
        self._created = int(time.time())
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            lifespan=self._live,
            exception_handlers={BadRequestError: self._refuse},
        )

    @asynccontextmanager
    async def _live(self, app: Starlette) -> AsyncIterator[None]:
        if self._config is None:
            async with self._generate(None):
                yield
            return
        async with (
            kvstore.open(self._config) as self._store,
            self._generate(PromptCache(self._store)),
        ):
            yield

    @asynccontextmanager
    async def _generate(self, cache: PromptCache | None) -> AsyncIterator[None]:
        self._generator = Generator(self._model, cache)
        try:
            yield
        finally:
            await self._generator.close()

    async def _complete(self, request: Request) -> Response:
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is no JSON ({error})") from error
        wanted = Completion.parse(body, self._model)
        generation = Generation(self._generator, wanted.prompt, wanted.max_tokens)
        if wanted.stream:
            # Starlette cancels it when the client goes.
            return StreamingResponse(
                self._events(generation, wanted), media_type="text/event-stream"
            )
        answer = await _while_connected(request, self._answer(generation, wanted))
        return JSONResponse(answer)

    async def _answer(self, generation: Generation, wanted: Completion) -> dict[str, Any]:
        async with aclosing(generation.tokens()) as stream:
            tokens = [token async for token in stream]
        choice = wanted.choice(tokenizer.decode(token.id for token in tokens), tokens)
        usage = usage_of(generation, len(tokens))
        return body_of(generation, self._model, [choice], usage=usage)

    async def _events(self, generation: Generation, wanted: Completion) -> AsyncGenerator[bytes]:
        decoder, count = tokenizer.Decoder(), 0
        async with aclosing(generation.tokens()) as tokens:
            async for token in tokens:
                count += 1
                last = count == wanted.max_tokens
                choice = wanted.choice(decoder.push(token.id, last=last), [token], last=last)
                yield _event(body_of(generation, self._model, [choice]))
        if wanted.usage:
            usage = usage_of(generation, count)
            yield _event(body_of(generation, self._model, [], usage=usage))
        yield DONE

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BadRequestError)
        return JSONResponse(error_of(error), error.status)

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvstore",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics.page(self._generator.counts, self._store))


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


async def _while_connected(
    request: Request, work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any]:
    """The result of `work`; when the client goes `work` is cancelled, and nobody reads it."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else {}
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each


async def _gone(request: Request) -> None:
    """Wait until the client of a request whose body has been read goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
