"""The example server over HTTP: equal answers with and without the cache, and where it hits."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.http_server.process import ServerProcess

NEEDED = ["httpx", "starlette", "torch", "transformers", "uvicorn", "uvloop"]
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"the example server needs {', '.join(MISSING)}", allow_module_level=True)

import httpx  # noqa: E402

from tests.patience import PATIENCE, until  # noqa: E402

CHUNK = 64
"""Tokens of a chunk; the server's default."""

MODEL = ["--layers", "2"]


def prompt_of(seed: int, tokens: int) -> list[int]:
    return list(random.Random(seed).randbytes(tokens))


@dataclass
class Answer:
    text: str
    tokens: list[int]
    logprobs: list[float]
    cached: int

    def same(self, other: Answer) -> bool:
        """Whether they are equal to the last bit, wherever they came from."""
        return (self.text, self.tokens, self.logprobs) == (
            other.text,
            other.tokens,
            other.logprobs,
        )


class Talk:
    """A server, and what is said to it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.start()

    def start(self) -> None:
        self._process = ServerProcess(self.folder / "server.log", *self._options)
        self._client: httpx.Client | None = None

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(base_url=self._process.url(), timeout=PATIENCE)
        return self._client

    def stop(self) -> int:
        if self._client is not None:
            self._client.close()
        return self._process.stop()

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body)

    def ask(self, prompt: list[int] | str, max_tokens: int = 8) -> Answer:
        response = self.post(
            prompt=prompt, max_tokens=max_tokens, logprobs=0, return_token_ids=True
        )
        assert response.status_code == 200, response.text
        return answer_of(response.json())

    def learn(self, prompt: list[int], max_tokens: int = 8) -> Answer:
        """Ask, and wait until what can be saved of it is saved."""
        answer = self.ask(prompt, max_tokens)
        self.until_idle()
        return answer

    def until_idle(self) -> None:
        """Wait until nothing is generated, saved, or leased."""
        until(lambda: not (self.metric("http_server_running") + self.metric("http_server_saving")))
        until(lambda: not self.metric("kvstore_host_busy_ratio"))

    def metric(self, name: str) -> float:
        """Summed over tiers, where it tells of each."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def loaded(self, place: str) -> float:
        return self.metric(f"kvstore_loaded_{place}_chunks_total")


def answer_of(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    return Answer(
        choice["text"],
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Talk, Talk]]:
    """One without a cache and one with, started at the same time."""
    plain, cached = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("cached")
    disk = ("--disk", str(cached / "cache"), "--disk-bytes", "512MiB")
    with ExitStack() as stack:
        talks = []
        for talk in (
            Talk(plain, *MODEL, "--no-cache"),
            Talk(cached, *MODEL, "--cpu-bytes", "64MiB", *disk),
        ):
            stack.callback(talk.stop)
            talks.append(talk)
        yield talks[0], talks[1]


@pytest.fixture
def plain(servers: tuple[Talk, Talk]) -> Talk:
    return servers[0]


@pytest.fixture
def cached(servers: tuple[Talk, Talk]) -> Talk:
    return servers[1]


def test_the_second_request_hits_host_memory_and_says_the_same(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(1, 4 * CHUNK + 44)
    wanted = plain.ask(prompt)
    assert wanted.cached == plain.ask(prompt).cached == 0
    first = cached.learn(prompt)
    assert first.cached == 0
    before = cached.loaded("host")
    second = cached.ask(prompt)
    assert second.cached == 4 * CHUNK
    assert cached.loaded("host") == before + 4
    assert first.same(wanted)
    assert second.same(wanted)


def test_other_prompts_get_other_answers(plain: Talk) -> None:
    """Otherwise the comparisons of this file would show nothing."""
    prompt = prompt_of(2, 4 * CHUNK + 44)
    other = [prompt[0] ^ 1, *prompt[1:]]
    assert not plain.ask(prompt).same(plain.ask(other))


def test_a_prompt_that_begins_as_another_shares_its_first_chunks(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(3, 4 * CHUNK)
    other = [*prompt[: 2 * CHUNK], prompt[2 * CHUNK] ^ 1, *prompt[2 * CHUNK + 1 :], 7]
    cached.learn(prompt)
    answer = cached.ask(other)
    assert answer.cached == 2 * CHUNK
    assert answer.same(plain.ask(other))


def test_the_same_chunk_after_another_beginning_is_not_shared(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(4, 3 * CHUNK)
    other = [*prompt_of(5, CHUNK), *prompt[CHUNK:], 7]
    cached.learn(prompt)
    cached.learn(other[: CHUNK + 1])
    answer = cached.ask(other)
    assert answer.cached == CHUNK
    assert answer.same(plain.ask(other))


def test_of_whole_chunks_the_last_is_computed_for_its_logits(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(6, 3 * CHUNK)
    cached.learn(prompt)
    answer = cached.ask(prompt)
    assert answer.cached == 2 * CHUNK
    assert answer.same(plain.ask(prompt))
    # It was stored all the same.
    assert cached.ask([*prompt, 1]).cached == 3 * CHUNK


def test_what_was_said_is_a_hit_in_the_next_turn(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(7, CHUNK + 40)
    said = cached.learn(prompt, 2 * CHUNK)
    turn = [*prompt, *said.tokens, *prompt_of(8, 30)]
    answer = cached.ask(turn)
    assert answer.cached == 3 * CHUNK
    assert answer.same(plain.ask(turn))


def test_a_text_is_its_bytes(cached: Talk) -> None:
    text = "häuser " * 12
    answer = cached.ask(text)
    assert answer.same(cached.ask(list(text.encode())))
    assert answer.text == bytes(answer.tokens).decode(errors="replace")


def test_a_stream_says_what_an_answer_says(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(9, 2 * CHUNK + 10)
    wanted = plain.ask(prompt, 40)
    cached.learn(prompt)
    body = {
        "prompt": prompt,
        "max_tokens": 40,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with cached.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * CHUNK
    choices = [part["choices"][0] for part in parts]
    assert [choice["finish_reason"] for choice in choices] == [None] * 39 + ["length"]
    streamed = Answer(
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [logprob for choice in choices for logprob in choice["logprobs"]["token_logprobs"]],
        2 * CHUNK,
    )
    assert streamed.same(wanted)


async def test_equal_prompts_at_the_same_time(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(10, 3 * CHUNK + 5)
    wanted = plain.ask(prompt)
    body = {"prompt": prompt, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=cached.client.base_url, timeout=PATIENCE) as client:
        for hits in (None, 3 * CHUNK):
            responses = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(6))
            )
            answers = [answer_of(response.json()) for response in responses]
            assert all(answer.same(wanted) for answer in answers)
            if hits is not None:
                assert [answer.cached for answer in answers] == [hits] * 6
            cached.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_generation(plain: Talk, cached: Talk, stream: bool) -> None:
    prompt = prompt_of(11 + stream, 3 * CHUNK + 5)
    body = {"prompt": prompt, "max_tokens": 7000, "stream": stream}
    with httpx.Client(base_url=cached.client.base_url, timeout=PATIENCE) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data: {")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1.0)
    # Seven thousand tokens would take much longer.
    cached.until_idle()
    answer = cached.ask(prompt)
    assert answer.cached == 3 * CHUNK
    assert answer.same(plain.ask(prompt))


def test_after_a_restart_it_hits_from_disk(plain: Talk, cached: Talk) -> None:
    prompt = prompt_of(13, 4 * CHUNK + 3)
    wanted = plain.ask(prompt)
    # Stopped at once: what is not saved yet is saved by the end.
    assert cached.ask(prompt).cached == 0
    assert cached.stop() == -signal.SIGTERM
    cached.start()
    answer = cached.ask(prompt)
    assert answer.cached == 4 * CHUNK
    assert cached.loaded("tier") == 4
    assert cached.loaded("host") == 0
    assert answer.same(wanted)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "prompt", "prompt"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [1, 256]}, "prompt", "256"),
        ({"prompt": [1, "a"]}, "prompt", "'a'"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "above 0"),
        ({"prompt": "x", "max_tokens": 9000}, "max_tokens", "8192"),
        ({"prompt": "x", "temperature": 0.7}, "temperature", "must be 0"),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "x", "logprobs": 5}, "logprobs", "0 or 1"),
        ({"prompt": "x", "stop": ["a"]}, "stop", "stop"),
        ([1], None, "JSON object"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    cached: Talk, body: object, param: str | None, told: str
) -> None:
    response = cached.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert told in error["message"]


def test_no_json_and_no_such_model(cached: Talk) -> None:
    response = cached.client.post("/v1/completions", content=b"{")
    assert response.status_code == 400
    assert "no JSON" in response.json()["error"]["message"]
    response = cached.post(prompt="x", model="another")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_the_other_routes(plain: Talk, cached: Talk) -> None:
    assert cached.client.get("/health").status_code == 200
    (model,) = cached.client.get("/v1/models").json()["data"]
    assert cached.post(prompt="x", max_tokens=1, model=model["id"]).status_code == 200
    page = cached.client.get("/metrics").text
    assert "# TYPE kvstore_host_used_ratio gauge\n" in page
    assert "# TYPE kvstore_stored_chunks_total counter\n" in page
    assert "kvstore_" not in plain.client.get("/metrics").text
