"""Hints of clients, through a real engine: what is retained stays, what is released does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.core.hints import Hints, read_hints
from tests.vllm.engines import FORKED, ONE_PROCESS, Run, run_engine

LENGTH = 256
CHUNK = 2 * 8 * 8 * 64 * 2 * 32
"""Bytes of one: keys and values, layers, heads, their size, 16 bits, tokens of a block."""
CHUNKS = LENGTH // 32
ROWS = 4 * CHUNKS
"""Host memory has room for four prompts."""
KEPT, OTHERS, MORE = [[1, LENGTH]], [[n, LENGTH] for n in range(10, 16)], [[20, LENGTH]]
SENT = [[30, LENGTH]]


def serve(folder: Path, rounds: list[dict[str, Any]], *, disk: bool = False) -> Run:
    tier = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "512MiB"}
    return run_engine(
        folder,
        {
            "engine": {"num_gpu_blocks_override": 60, "max_model_len": 1024},
            "kvstore": {
                "cpu_bytes_to_use": ROWS * CHUNK,
                "eviction_policy": "lru",
                "tiers": [tier] if disk else [],
            },
            "max_tokens": 6,
            "rounds": rounds,
        },
        # An engine in the process that asks takes no step while nobody asks.
        FORKED if disk else ONE_PROCESS,
    )


def hinted(name: str, prompts: Any, **hints: Any) -> dict[str, Any]:
    return {"name": name, "prompts": prompts, "kv_transfer_params": {"kvstore": hints}}


def plain(name: str, prompts: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "prompts": prompts, **more}


def enveloped(name: str, prompts: Any, *actions: list[Any]) -> dict[str, Any]:
    return {"name": name, "prompts": prompts, "kv_hints": list(actions)}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An engine over host memory alone."""
    return serve(
        tmp_path_factory.mktemp("host"),
        [
            hinted("kept", KEPT, retain_s=600.0, no_such_hint=1),
            plain("others", OTHERS),
            plain("kept again", KEPT),
            hinted("released", KEPT, release=True),
            plain("others again", OTHERS),
            plain("gone", KEPT),
            hinted("not stored", MORE, store=False),
            plain("not found", MORE),
        ],
    )


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An engine over host memory and a disk."""
    return serve(
        tmp_path_factory.mktemp("disk"),
        [
            # Until these are on disk nothing else finds room.
            plain("others", OTHERS, pause=3.0),
            hinted("paused", KEPT, retain_s=600.0, demote=True, prefetch_after_s=3.0)
            | {"pause": 6.0},
            plain("back", KEPT),
            enveloped(
                "by envelope",
                SENT,
                ["retain", "1.0", {"ttl_s": 600.0, "host": True}],
                ["levitate", "1.0", {}],
                ["release", "2.0", {}],
            ),
            plain("others again", OTHERS, pause=3.0),
            plain("by envelope again", SENT),
            enveloped("released by envelope", SENT, ["release", "1.0", {}]),
            plain("after", MORE),
        ],
        disk=True,
    )


def test_what_is_retained_is_found_although_others_needed_the_room(host: Run) -> None:
    assert host.rounds["others"].cached == [0] * len(OTHERS)
    assert host.rounds["kept again"].cached == [LENGTH]
    assert host.rounds["released"].cached == [LENGTH]


def test_what_is_released_leaves_for_others(host: Run) -> None:
    assert host.rounds["gone"].cached == [0]


def test_what_shall_not_be_stored_is_not(host: Run) -> None:
    assert host.rounds["not found"].cached == [0]


def test_every_completion_is_as_without_hints(host: Run) -> None:
    kept = [host.rounds[name].tokens for name in ("kept", "kept again", "released", "gone")]
    assert kept == [kept[0]] * 4
    assert host.rounds["not stored"].tokens == host.rounds["not found"].tokens
    assert host.rounds["others"].tokens == host.rounds["others again"].tokens


def test_a_conversation_that_pauses_is_back_in_host_memory_when_it_returns(disk: Run) -> None:
    assert disk.rounds["back"].cached == [LENGTH]
    assert disk.rounds["back"].tokens == disk.rounds["paused"].tokens
    before, after = disk.rounds["paused"].metrics, disk.rounds["back"].metrics
    assert after["demoted_chunks"] == after["prefetched_chunks"] == CHUNKS
    assert after.get("deferrals", 0) == before.get("deferrals", 0), "it had to wait for the disk"
    assert after["tier_pinned_chunks"] == CHUNKS


def test_hints_are_counted_and_what_nobody_knows_is_ignored(host: Run) -> None:
    metrics = host.rounds["not found"].metrics
    assert (metrics["hints"], metrics["hints_ignored"]) == (3, 1)
    assert host.rounds["others"].metrics["host_pinned_ratio"] == pytest.approx(CHUNKS / ROWS)
    assert metrics["host_pinned_ratio"] == 0


def test_envelopes_reach_the_engine_from_whoever_calls_it(disk: Run) -> None:
    """Through vLLM's own protocol, from one process to another."""
    before, told = disk.rounds["back"].metrics, disk.rounds["others again"].metrics
    assert (before["hints"], before["hints_ignored"]) == (3, 0)
    assert (told["hints"], told["hints_ignored"]) == (4, 2)
    assert told["host_pinned_ratio"] == pytest.approx(CHUNKS / ROWS)
    assert disk.rounds["by envelope"].cached == [0]
    again = disk.rounds["by envelope again"]
    # A round and a pause later: a slow disk has them by then.
    assert again.metrics["tier_pinned_chunks"] == 2 * CHUNKS
    assert again.cached == [LENGTH]
    assert again.tokens == disk.rounds["by envelope"].tokens
    assert again.metrics["deferrals"] == told["deferrals"], "it had to wait for the disk"
    after = disk.rounds["after"].metrics
    assert (after["hints"], after["host_pinned_ratio"]) == (5, 0)
    assert after["tier_pinned_chunks"] == CHUNKS


def test_envelopes_of_vllm_are_read() -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    def action(kind: str, **payload: Any) -> KvHintAction:
        return KvHintAction(f"{kind}-1", kind, "1.0", payload)

    retain = action("retain", ttl_s=60.0, host=True)
    envelope = KvHintsEnvelope("1.0", "m", [retain, action("demote"), action("levitate")])
    assert read_hints(None, envelope) == (
        Hints(retain_s=60.0, retain_host=True, demote=True),
        2,
        1,
    )
