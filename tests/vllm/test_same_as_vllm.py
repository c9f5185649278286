"""The same requests through vLLM's own scheduler, and the same calls to its connector and ours."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvstore.connector.mediums import BlockIDsLoadStoreSpec, ConnectorOutput
from kvstore.connector.server import CachedRequests, NewRequest, StepOutput
from tests.vllm import wanted
from tests.vllm.scripted import Contents, Script
from tests.vllm.shapes import Shape, our_scheduler
from tests.vllm.streams import Server

STEPS = 130
SEEDS = range(5)

SCRIPT = {"deferred": 10, "refused": 10, "evicted": 2, "unwanted": 4}
PENDING = {**SCRIPT, "pending_deferred": True}

ALWAYS = (
    "finished",
    "aborted",
    "deferred",
    "found",
    "loads",
    "stores",
    "flushed by ours",
    "reused while under way",
)
"""What each server has to go through, or its streams prove nothing."""

PREEMPTS = ("preempted", "resumed", wanted.AGAIN)

SERVERS: dict[str, tuple[Shape, tuple[str, ...]]] = {
    "full": (Shape((None,), script=SCRIPT), (*PREEMPTS, "aborted while loading")),
    "full, resets": (
        Shape((None,), factor=2, resets=True, script=PENDING),
        (*PREEMPTS, "resets"),
    ),
    "full, three blocks in a chunk, no prefix cache": (
        Shape((None,), factor=3, caching=False, script=SCRIPT),
        (*PREEMPTS, "aborted while loading"),
    ),
    "full, overlapping steps": (
        Shape((None,), asynchronous=True, resets=True, script=SCRIPT),
        (*PREEMPTS, "resets"),
    ),
    "full, overlapping steps, blocks that are free at once": (
        Shape((None,), asynchronous=True, blocks=32, role="kv_producer", script=SCRIPT),
        PREEMPTS,
    ),
    "window": (Shape((10,), blocks=17, script=SCRIPT), PREEMPTS),
    "window, overlapping steps": (
        Shape((14,), factor=3, blocks=28, asynchronous=True, script=SCRIPT),
        (wanted.LOST,),
    ),
    "both": (Shape((None, 10), blocks=56, script=PENDING), PREEMPTS),
    "both, prompts only, no prefix cache": (
        Shape((None, 10), blocks=60, factor=2, caching=False, prompt_only=True, script=SCRIPT),
        ("aborted while loading",),
    ),
    "both, three blocks in a chunk, overlapping steps": (
        Shape((None, 9), blocks=60, factor=3, asynchronous=True, script=SCRIPT),
        (*PREEMPTS, wanted.LOST),
    ),
    "both, two hashes in a block": (
        Shape((None, 17), block=8, hashed=4, blocks=36, script=SCRIPT),
        PREEMPTS,
    ),
    "both, resumed requests like new ones": (
        Shape((None, 9), blocks=50, factor=2, resumed_as_new=True, script=SCRIPT),
        ("preempted",),
    ),
    "two windows": (
        Shape((None, 7, 22), blocks=76, factor=2, asynchronous=True, script=SCRIPT),
        (*PREEMPTS, wanted.LOST),
    ),
    "two windows, prompts only": (
        Shape((None, 7, 22), blocks=72, factor=3, prompt_only=True, script=SCRIPT),
        (*PREEMPTS, wanted.LOST),
    ),
    "two windows, vLLM's default retention": (
        Shape((None, 9, 22), blocks=80, factor=2, retained=0, script=SCRIPT),
        (wanted.SPARSE,),
    ),
    "chunks of two sizes": (Shape((None, 9), block=(8, 4), blocks=56, script=SCRIPT), ()),
    "windows of two sizes, small chunks in the larger": (
        Shape((6, 5), block=(4, 8), blocks=36, script=SCRIPT),
        (),
    ),
    "larger chunks in the window": (Shape((None, 13), block=(4, 8), blocks=56, script=SCRIPT), ()),
    "windows and resets": (
        Shape((None, 7, 22), blocks=80, factor=3, resets=True, script=SCRIPT),
        ("resets", wanted.LEFT),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM warns of each store that is refused."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", SERVERS)
def test_the_same_is_found_loaded_stored_and_flushed(name: str, folder: Path) -> None:
    shape, exercised = SERVERS[name]
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        happened += Server(shape, seed, folder).run(STEPS)
    wanted_of = {*ALWAYS, *exercised} - wanted.MENDED
    missing = sorted(what for what in wanted_of if not happened[what])
    assert not missing, f"the streams have not come to {missing}: {dict(happened)}"


@dataclass
class Request:
    """As much of a request as ours looks at."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    def is_finished(self) -> bool:
        return False


def test_a_reset_offers_no_blocks_that_a_window_has_left() -> None:
    shape = Shape((4,))
    server = our_scheduler(shape, Contents(Script(0)), 4)
    first = Request("first", 12, block_hashes=[b"0", b"1", b"2"])
    server.get_num_new_matched_tokens(first, 0)
    meta = server.build_connector_meta(
        StepOutput([NewRequest("first", [[1, 2, 3]])], num_scheduled_tokens={"first": 12})
    )
    server.update_connector_output(ConnectorOutput(Counter(dict.fromkeys(meta.store_jobs, 1))))
    first.num_computed_tokens = first.num_tokens = 12

    # The window has left blocks 1 and 2. Another request gets them.
    second = Request("second", 8, block_hashes=[b"3", b"4"])
    server.get_num_new_matched_tokens(second, 0)
    meta = server.build_connector_meta(
        StepOutput([NewRequest("second", [[2, 1]])], num_scheduled_tokens={"second": 8})
    )
    server.update_connector_output(ConnectorOutput(Counter(dict.fromkeys(meta.store_jobs, 1))))

    server.reset()
    first.num_tokens = 13
    meta = server.build_connector_meta(
        StepOutput(
            scheduled_cached_reqs=CachedRequests(["first"], [[[4]]]),
            num_scheduled_tokens={"first": 1},
        )
    )
    (job,) = meta.store_jobs.values()
    assert isinstance(job.src_spec, BlockIDsLoadStoreSpec)
    assert set(job.src_spec.block_ids.tolist()) == {3}


def test_a_window_is_there_at_the_end_that_is_found() -> None:
    contents = Contents(Script(0))
    server = our_scheduler(Shape((6, 5), block=(4, 8)), contents, 4)
    # Group 0 has chunks 1 and 2, group 1 its only one: they agree on 8 tokens, for which the
    # window of group 0 reaches back into its chunk 0.
    contents.stored = {b"h1\0\0\0\0", b"h2\0\0\0\0", b"h1\0\0\0\1"}
    request = Request("first", 14, block_hashes=[b"h0", b"h1", b"h2"])
    assert server.get_num_new_matched_tokens(request, 0) == (0, False)
