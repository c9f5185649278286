"""Real engines on two hosts, as far as disks go, over one real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.random_model import write_model
from examples.rounds import LLAMA
from tests.tiers.remote.servers import RedisServer, redis_server
from tests.vllm.engines import ONE_PROCESS, Round, run_engine
from tests.vllm.test_shapes import SMALL

PROMPTS = [[seed, 300] for seed in range(4)]

FOUND = [256] * 4
"""Of 300 tokens: whole chunks of two blocks of 32."""


def engine(
    folder: Path, names: list[str], server: RedisServer | None, launcher: int = 0
) -> dict[str, Round]:
    """Rounds of the same prompts; with a server over a disk of its own and the store behind it."""
    kvstore: dict[str, Any] | None = None
    if server is not None:
        disk = {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": "64MiB"}
        store = {"type": "redis", "url": server.url, "timeout_s": 30}
        kvstore = {
            "cpu_bytes_to_use": "32MiB",
            "blocks_per_chunk": 2,
            "tiers": [{**disk, "segment_bytes": "16MiB"}, store],
        }
    write_model(folder / "run" / "tiny-model", {**LLAMA, **SMALL})
    scenario = {
        "config": SMALL,
        "engine": {"load_format": "auto", "dtype": "float32"},
        "kvstore": kvstore,
        "rounds": [{"name": name, "prompts": PROMPTS} for name in names],
    }
    return run_engine(folder / "run", scenario, ONE_PROCESS, launcher=launcher).rounds


def test_an_engine_finds_what_one_on_another_host_has_computed(tmp_path: Path) -> None:
    alone = engine(tmp_path / "alone", ["cold"], None)["cold"]
    with redis_server() as server:
        one = engine(tmp_path / "one", ["cold"], server)["cold"]
        other = engine(tmp_path / "other", ["found", "host"], server, launcher=1)
    assert one.cached == [0] * 4
    assert other["found"].cached == other["host"].cached == FOUND
    assert one.tokens == other["found"].tokens == other["host"].tokens == alone.tokens


def test_an_engine_whose_store_is_away_computes(tmp_path: Path) -> None:
    with redis_server() as server:
        server.stop()
        found = engine(tmp_path, ["cold", "host"], server)
    assert found["cold"].cached == [0] * 4
    assert found["host"].cached == FOUND
    assert found["cold"].tokens == found["host"].tokens
