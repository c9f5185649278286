"""Requests and answers of ``/v1/completions`` as OpenAI writes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.http_server import tokenizer
from examples.http_server.generation import Generation
from examples.http_server.model import Model, Token

__all__ = ["BadRequestError", "Completion", "body_of", "error_of", "usage_of"]

ALLOWED = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "stream",
    "stream_options",
    "logprobs",
    "return_token_ids",
    "user",
)

MAX_TOKENS = 16
"""Tokens of a completion that does not say how many; OpenAI's default."""


class BadRequestError(Exception):
    """The client asks for what there is not.

    Attributes:
        param: the parameter at fault, if it is one.
        status: of the HTTP answer.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that can be served.

    Attributes:
        prompt: its tokens.
        max_tokens: how many to generate.
        stream: whether each token is sent as soon as it is known.
        usage: whether a stream ends with the usage.
        logprobs: whether the logarithms of probabilities are told.
        token_ids: whether the tokens are told, which bytes that are no text do not show.
    """

    prompt: list[int]
    max_tokens: int
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool

    @classmethod
    def parse(cls, body: object, model: Model) -> Completion:
        """Check what a client has sent.

        Raises:
            BadRequestError: naming the parameter and what is allowed.
        """
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        # OpenAI's clients send null for what they leave out.
        values = {key: value for key, value in body.items() if value is not None}
        for key in values:
            if key not in ALLOWED:
                raise BadRequestError(
                    f"{key} is not known here; there are {', '.join(ALLOWED)}", key
                )
        if values.get("model", model.name) != model.name:
            raise BadRequestError(f"the only model is {model.name}", "model", 404)
        if values.get("temperature", 0) != 0:
            raise BadRequestError(
                "temperature must be 0: every token is the likeliest", "temperature"
            )
        if values.get("logprobs", 0) not in (0, 1) or isinstance(values.get("logprobs"), bool):
            raise BadRequestError("logprobs must be 0 or 1: only the chosen token's", "logprobs")
        options = values.get("stream_options", {})
        if not isinstance(options, dict) or set(options) - {"include_usage"}:
            raise BadRequestError("stream_options may hold include_usage only", "stream_options")
        prompt = _prompt(values.get("prompt"))
        max_tokens = values.get("max_tokens", MAX_TOKENS)
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise BadRequestError("max_tokens must be a whole number above 0", "max_tokens")
        if len(prompt) + max_tokens > model.context:
            raise BadRequestError(
                f"{len(prompt)} tokens of prompt and max_tokens = {max_tokens} are more than "
                f"the {model.context} that the model takes",
                "max_tokens" if len(prompt) < model.context else "prompt",
            )
        return cls(
            prompt=prompt,
            max_tokens=max_tokens,
            stream=_flag(values, "stream"),
            usage=_flag(options, "include_usage"),
            logprobs="logprobs" in values,
            token_ids=_flag(values, "return_token_ids"),
        )

    def choice(self, text: str, tokens: Sequence[Token], *, last: bool = True) -> dict[str, Any]:
        """The only choice of an answer, or of one part of a stream."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if last else None,
        }
        if self.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        if self.logprobs:
            choice["logprobs"] = {
                "tokens": [tokenizer.decode([token.id]) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": None,
                # A byte in the middle of a character has no place in the text.
                "text_offset": None,
            }
        return choice


def body_of(
    generation: Generation, model: Model, choices: list[dict[str, Any]], **more: object
) -> dict[str, Any]:
    """An answer, or one part of a stream."""
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": choices,
        **more,
    }


def usage_of(generation: Generation, completion_tokens: int) -> dict[str, Any]:
    """What was asked, said, and found in the cache."""
    asked = len(generation.prompt)
    return {
        "prompt_tokens": asked,
        "completion_tokens": completion_tokens,
        "total_tokens": asked + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def error_of(error: BadRequestError) -> dict[str, Any]:
    """The body that tells a client what is wrong."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "param": error.param,
            "code": "model_not_found" if error.status == 404 else None,
        }
    }


def _prompt(value: object) -> list[int]:
    if isinstance(value, str):
        try:
            value = tokenizer.encode(value)
        except UnicodeEncodeError as error:
            raise BadRequestError(f"prompt is no text ({error.reason})", "prompt") from error
    if not isinstance(value, list) or not value:
        raise BadRequestError("prompt must be a text or a list of tokens, not empty", "prompt")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise BadRequestError(f"prompt holds {token!r:.40}, which is no token", "prompt")
        if not 0 <= token < tokenizer.VOCABULARY:
            raise BadRequestError(
                f"prompt holds the token {token}; they go from 0 to {tokenizer.VOCABULARY - 1}",
                "prompt",
            )
    return value


def _flag(values: Mapping[str, object], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false", name)
    return value
