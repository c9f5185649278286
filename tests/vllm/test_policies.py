"""A policy from another package, demotion and recording, in a real vLLM engine."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.simulation import Setup, read_trace, replay
from tests.vllm.conftest import SHORT
from tests.vllm.engines import ONE_PROCESS, Run, run_engine
from tests.vllm.test_engine import CHUNK, disk

MODULE = """
import os
from kvstore.policies.lru import LRU

class Elsewhere(LRU):
    name = "elsewhere"

    def __init__(self, capacity, *, label: str = "none"):
        super().__init__(capacity)
        self._seen = open(os.path.join(os.environ["ELSEWHERE"], label), "a")

    def insert(self, key):
        super().insert(key)
        self._seen.write("insert\\n")
        self._seen.flush()

    def evict(self, count, protected, incoming=()):
        victims = super().evict(count, protected, incoming)
        self._seen.write("evict\\n" * len(victims or ()))
        self._seen.flush()
        return victims
"""


def test_a_policy_of_another_package_serves_a_real_engine(tmp_path: Path, reference: Run) -> None:
    site, seen = tmp_path / "site", tmp_path / "seen"
    info = site / "elsewhere-1.0.dist-info"
    info.mkdir(parents=True)
    seen.mkdir()
    (site / "elsewhere_policies.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvstore.policies]\nelsewhere = elsewhere_policies:Elsewhere\n"
    )
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*filter(None, inherited), str(Path(__file__).parents[2]), str(site)]
    trace = tmp_path / "trace.kvt"
    run = run_engine(
        tmp_path / "engine",
        {
            "kvstore": {
                "cpu_bytes_to_use": 100 * CHUNK,
                "eviction_policy": {"name": "elsewhere", "label": "host"},
                "record_trace": str(trace),
                # Room for three prompts: where a slow disk has left it no others, a load takes
                # rows from chunks that wait for their copies, and those are lost. So most prompts
                # are found again, and not all.
                "demote_ahead": 0.5,
                "tiers": disk(
                    tmp_path / "cache",
                    flow="demote",
                    eviction_policy={"name": "elsewhere", "label": "disk"},
                ),
            },
            "rounds": [
                {"name": "cold", "prompts": SHORT},
                {"name": "again", "prompts": SHORT},
                # In one process, the end of a request is noticed with the next one's first step.
                {"name": "last", "prompts": [[100, 32]]},
            ],
        },
        {
            **ONE_PROCESS,
            "PYTHONPATH": os.pathsep.join(paths),
            "ELSEWHERE": str(seen),
        },
    )
    wanted = reference.rounds["short"].tokens
    assert run.rounds["cold"].tokens == wanted
    assert run.rounds["again"].tokens == wanted
    assert sum(run.rounds["again"].cached) > 0.5 * sum(length for _, length in SHORT)
    host = (seen / "host").read_text().split()
    assert host.count("insert") > host.count("evict") > 50
    assert (seen / "disk").read_text().count("insert") > 50
    assert "elsewhere" in run.log

    recorded = read_trace(trace)
    whole = [request for request in recorded.requests if len(request) == 512 // 32]
    assert len(whole) == 2 * len(SHORT)
    assert recorded.chunk_bytes == CHUNK
    assert replay(recorded, Setup(recorded.unique)).hit_ratio > 0.4
