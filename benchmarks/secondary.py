"""Our disk tier beside vLLM's own, both as secondary tiers of vLLM's `TieringOffloadingManager`.

    python benchmarks/secondary.py FOLDER [--sizes 256KiB,2MiB] [--json rows.json]

FOLDER lies on the disk that is meant; a few GB are used there and removed at the end. Manager,
host memory in /dev/shm and the calls of the scheduler are vLLM's for both; only what stands in
``secondary_tiers`` differs: ``KVStoreTier``, or ``fs`` with its defaults.

Cases, with one request alone (a chain of a quarter of the footprint) and with 16 at once (chains of
a sixteenth each); host memory has room for twice the footprint, since ours takes no stores beyond
half of it:

    store  from the end of the copy from the device until every job has ended
    load   from the first lookup of chunks that are on disk alone until the last is in its row

While it waits, the scheduler makes a step every millisecond, as an idle vLLM does. Ours writes
over slots that held something, the steady state, and makes and checks digests; the peer makes a
file for each chunk. Its files are emptied between rounds, and removed at the end: see `peer_fs.py`.
The contestants take turns, in another order each round. Figures are medians over the rounds, and
ratios medians of the ratio within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dry import read_options
from meter import Batch, median, meter, size_text, sizes

from kvstore.sizes import parse_size

STEP_SECONDS = 0.001
REQUESTS = (1, 16)


class Contestant:
    """vLLM's manager over one secondary tier."""

    def __init__(self, name: str, folder: Path, tier: dict[str, Any], chunk: int, rows: int):
        from specs import offloading_config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.name = name
        self._folder = folder
        extra = {"cpu_bytes_to_use": 2 * rows * chunk, "secondary_tiers": [tier]}
        engine = f"bench-{name}-{os.getpid()}-{chunk}"
        self._manager: Any = TieringOffloadingSpec(
            offloading_config(extra, chunk, engine)
        ).get_manager()
        view = self._manager.primary_tier.get_kv_memoryview()
        self._rows = np.asarray(view).view(np.uint8)
        for row in self._rows:
            row[:] = np.frombuffer(os.urandom(chunk), np.uint8)
        self._requests = itertools.count()

    def store(self, chains: Sequence[list[bytes]]) -> Batch:
        """The device has written these chains: until all are on disk."""
        batch, prepared = Batch(), []
        for chain in chains:
            context = self._request()
            out = self._manager.prepare_store(chain, context)
            assert out is not None
            assert out.keys_to_store == chain
            for key, row in zip(chain, out.store_spec.chunk_ids, strict=True):
                self._rows[row, : len(key)] = np.frombuffer(key, np.uint8)
            prepared.append((chain, context))
        with meter(batch):
            for chain, context in prepared:
                self._manager.complete_store(chain, context)
            while self._manager.has_pending_work():
                self._step()
        for _, context in prepared:
            self._manager.on_request_finished(context)
        return batch

    def load(self, chains: Sequence[list[bytes]]) -> Batch:
        """Requests with these prompts have come: until all of their chunks can be loaded."""
        self._manager.reset_cache()
        batch, waiting = Batch(), [(chain, self._request()) for chain in chains]
        contexts = [context for _, context in waiting]
        with meter(batch):
            while True:
                waiting = [each for each in waiting if not self._found(*each)]
                if not waiting:
                    break
                self._step()
        for chain, context in zip(chains, contexts, strict=True):
            spec = self._manager.prepare_load(chain, context)
            for key, row in zip(chain, spec.chunk_ids, strict=True):
                assert self._rows[row, : len(key)].tobytes() == key, "wrong bytes"
            self._manager.complete_load(chain, context)
            self._manager.on_request_finished(context)
        return batch

    def settle(self) -> None:
        """Empty the files of a tier that has no capacity."""
        if self.name == "vllm":
            for path in self._folder.rglob("*.bin"):
                os.truncate(path, 0)
        self._manager.reset_cache()

    def close(self) -> None:
        del self._rows
        self._manager.shutdown()

    def _found(self, chain: list[bytes], context: Any) -> bool:
        """Whether all of it can be loaded. Each chunk is asked for, as the scheduler does."""
        from vllm.v1.kv_offload.base import LookupResult

        answers = [self._manager.lookup(key, context) for key in chain]
        assert LookupResult.MISS not in answers, "a chunk that was stored is not found"
        return all(answer is LookupResult.HIT for answer in answers)

    def _request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(f"r{next(self._requests)}")
        self._manager.on_new_request(context)
        return context

    def _step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self._manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(STEP_SECONDS)


def contestants(folder: Path, chunk: int, rows: int) -> list[Contestant]:
    """Both, each in a folder of its own; the slots of ours have held something."""
    from kvstore.tiers.disk.format import Geometry

    segment = Geometry(rows, chunk, chunk).file_bytes
    paths = {name: folder / f"{name}-{chunk}" for name in ("ours", "vllm")}
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.vllm",
        "path": str(paths["ours"]),
        "capacity_bytes": 2 * segment,
        "segment_bytes": segment,
        "automatic_identity": False,
        "identity": {"model": "bench"},
    }
    ours = Contestant("ours", paths["ours"], tier, chunk, rows)
    for _ in range(3):
        ours.store(chains(rows, 16))
        ours.settle()
    peer = {"type": "fs", "root_dir": str(paths["vllm"])}
    return [ours, Contestant("vllm", paths["vllm"], peer, chunk, rows)]


def chains(rows: int, requests: int) -> list[list[bytes]]:
    """New chains of equal length."""
    length = rows // (4 if requests == 1 else requests)
    return [[os.urandom(32) + bytes(4) for _ in range(length)] for _ in range(requests)]


def measured(
    players: Sequence[Contestant], chunk: int, rows: int, requests: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each case."""
    speeds: dict[tuple[str, str], list[float]] = {}
    cpus: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for player in random.sample(players, len(players)):
            for case in ("store", "load"):
                told = chains(rows, requests)
                if case == "load":
                    player.store(told)
                batch = player.store(told) if case == "store" else player.load(told)
                moved = chunk * sum(map(len, told)) / 1e9
                speeds.setdefault((case, player.name), []).append(moved / batch.wall)
                cpus.setdefault((case, player.name), []).append(batch.cpu / moved)
                player.settle()
    found = []
    for case in ("store", "load"):
        ours, vllm = speeds[case, "ours"], speeds[case, "vllm"]
        found.append(
            {
                "case": case,
                "requests": requests,
                "chunk": size_text(chunk),
                "GBps": round(median(ours), 2),
                "vllm_GBps": round(median(vllm), 2),
                "ratio_to_vllm": round(median([a / b for a, b in zip(ours, vllm, strict=True)]), 2),
                "cpu_s_per_gb": round(median(cpus[case, "ours"]), 2),
                "vllm_cpu_s_per_gb": round(median(cpus[case, "vllm"]), 2),
            }
        )
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [" ".join(f"{name:>18}" for name in rows[0])]
    lines += [" ".join(f"{value!s:>18}" for value in row.values()) for row in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Our disk tier beside vLLM's, in its tiering.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=sizes, default=sizes("256KiB,2MiB"))
    parser.add_argument("--footprint", type=parse_size, default=256 * 2**20, help="256MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = read_options(parser, sizes=[2**16], footprint=2**22, rounds=1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # noqa: F401

    logging.getLogger("vllm").setLevel(logging.ERROR)
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as name:
        for chunk in options.sizes:
            count = options.footprint // chunk
            players = contestants(Path(name), chunk, count)
            try:
                for requests in REQUESTS:
                    for row in measured(players, chunk, count, requests, options.rounds):
                        rows.append(row)
                        print(json.dumps(row), flush=True)
            finally:
                for player in players:
                    player.close()
    print(table(rows))
    print(f"took {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
