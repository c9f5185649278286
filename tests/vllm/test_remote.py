"""Real engines on two hosts, as far as disks go, over one real store."""

from __future__ import annotations

from pathlib import Path

from benchmarks.random_model import write_model
from examples.rounds import LLAMA
from tests.tiers.remote.servers import RedisServer, redis_server
from tests.vllm.engines import ONE_PROCESS, Round, run_engine
from tests.vllm.test_shapes import FOUND, PROMPTS, SMALL


def engine(
    folder: Path, names: list[str], server: RedisServer, launcher: int = 0
) -> dict[str, Round]:
    """Rounds of the same prompts, over a disk of its own and the store behind it."""
    disk = {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": "64MiB"}
    store = {"type": "redis", "url": server.url, "timeout_s": 30}
    write_model(folder / "run" / "tiny-model", {**LLAMA, **SMALL})
    scenario = {
        "config": SMALL,
        "engine": {"load_format": "auto"},
        "kvstore": {
            "cpu_bytes_to_use": "32MiB",
            "blocks_per_chunk": 2,
            "tiers": [{**disk, "segment_bytes": "16MiB"}, store],
        },
        "rounds": [{"name": name, "prompts": PROMPTS} for name in names],
    }
    return run_engine(folder / "run", scenario, ONE_PROCESS, launcher=launcher).rounds


def test_an_engine_finds_what_one_on_another_host_has_computed(tmp_path: Path) -> None:
    with redis_server() as server:
        one = engine(tmp_path / "one", ["cold"], server)["cold"]
        other = engine(tmp_path / "other", ["found", "host"], server, launcher=1)
    assert one.cached == [0] * 4
    assert other["found"].cached == other["host"].cached == FOUND
    assert one.tokens == other["found"].tokens == other["host"].tokens
