"""A client of others: what it may answer, and what is said of answers that it may not give."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

import pytest

import kvstore
from kvstore import plugins
from kvstore.plugins import register_tier
from tests.world.share import SERVERS, ShareClient, ShareServer, ShareTier

CHUNK = 4096
KEYS = [f"key-{number}".encode() for number in range(6)]
PAYLOADS = [(key * CHUNK)[:CHUNK] for key in KEYS]

Change = Callable[[list[Any]], Any]


class Client(ShareClient):
    """A store in memory, whose answers `changes` changes, by call."""

    changes: ClassVar[dict[str, Change]] = {}

    def _told(self, call: str, answers: list[Any]) -> Any:
        change = self.changes.get(call)
        return answers if change is None else change(answers)

    async def exists(self, names: Any) -> Any:
        return self._told("exists", await super().exists(names))

    async def put(self, names: Any, records: Any, payloads: Any, **more: Any) -> Any:
        return self._told("put", await super().put(names, records, payloads, **more))

    async def get(self, names: Any, payloads: Any) -> Any:
        return self._told("get", await super().get(names, payloads))


class OwnStore(ShareTier):
    name = "test-own-client"

    def connect(self) -> Any:
        return Client(self.server)


def opened(**changes: Change) -> Any:
    Client.changes = changes
    return kvstore.open(
        {
            "cpu_bytes_to_use": 16 * CHUNK,
            "chunk_bytes": CHUNK,
            "identity": {"model": "m"},
            "recompute_s": 0,
            "tiers": [{"type": "test-own-client"}],
        }
    )


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins._kinds, "classes", dict(plugins._kinds.classes))
    register_tier(OwnStore)
    monkeypatch.setitem(SERVERS, "share", ShareServer(Random(0)))
    monkeypatch.setattr(Client, "changes", {})


async def stored() -> None:
    async with opened() as store:
        assert await store.put(KEYS, PAYLOADS) == len(KEYS)
        assert await store.flush(20)
    assert len(SERVERS["share"].values) == len(KEYS)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_a_record_may_be_any_kind_of_bytes(kind: Callable[[bytes], Any]) -> None:
    await stored()
    async with (
        opened(get=lambda records: [kind(record) for record in records]) as store,
        store.get(KEYS) as chunks,
    ):
        assert [bytes(chunk) for chunk in chunks] == PAYLOADS


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda answers: [True] * len(answers), "put returned a bool; allowed are, for each: None"),
        (lambda answers: [False] * len(answers), "put returned a bool"),
        (lambda answers: [""] * len(answers), "put returned an empty message"),
        (lambda answers: answers[1:], "put returned 5 answers for 6 values"),
        (lambda answers: None, "put returned 1 answers for 6 values"),
    ],
)
async def test_an_answer_to_put_that_says_nothing_is_told(
    answer: Change, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(put=answer) as store:
        assert await store.put(KEYS, PAYLOADS) == len(KEYS)
        assert await store.flush(20)
        tier = store.stats().tiers[0]
        assert (tier.written, tier.failed_writes) == (0, len(KEYS))
    assert told in caplog.text


@pytest.mark.parametrize(
    ("call", "answer", "told"),
    [
        ("get", lambda answers: [7] * len(answers), "get returned a int"),
        ("get", lambda answers: answers[1:], "get returned 5 answers for 6 values"),
        ("exists", lambda answers: answers[1:], "exists returned 5 answers for 6 values"),
        ("exists", lambda answers: len(answers), "exists returned 1 answers for 6 values"),
    ],
)
async def test_an_answer_that_cannot_be_taken_is_a_miss_and_is_told(
    call: str, answer: Change, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    await stored()
    caplog.set_level(logging.WARNING)
    async with opened(**{call: answer}) as store:
        assert await store.get_into(KEYS, [bytearray(CHUNK) for _ in KEYS]) == 0
    assert told in caplog.text
    # Nothing is taken for damaged that is whole.
    async with opened() as store:
        assert await store.get_into(KEYS, [bytearray(CHUNK) for _ in KEYS]) == len(KEYS)
