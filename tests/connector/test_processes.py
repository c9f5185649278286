"""A scheduler and workers that are processes of their own share host memory."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore.connector.mediums import ConnectorMetadata, ConnectorOutput  # noqa: E402
from kvstore.connector.scheduler import ConnectorScheduler  # noqa: E402
from kvstore.connector.server import (  # noqa: E402
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ServerConfig,
)
from kvstore.connector.spec import KVStoreSpec  # noqa: E402
from kvstore.connector.worker import ConnectorWorker  # noqa: E402
from kvstore.engine.host_memory import share_region  # noqa: E402
from kvstore.errors import ConfigError, KVStoreError  # noqa: E402
from kvstore.tiers.pinned import RegionShape  # noqa: E402
from kvstore.tiers.rendezvous import OtherShapeError  # noqa: E402
from tests.connector.scheduling import TOKENS, Request, Server  # noqa: E402
from tests.patience import PATIENCE  # noqa: E402

WORKERS = 2
PAGE = 3000
PROMPT = list(range(6 * TOKENS))


def spec_of(server: str | None, rank: int = 0, folder: Path | None = None) -> KVStoreSpec:
    tier = {"type": "disk", "path": str(folder), "capacity_bytes": "8MiB"}
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": "256KiB",
        "identity": {"model": "m"},
        "block_size": 2 * TOKENS,
        "tiers": [{**tier, "segment_bytes": "1MiB"}] if folder is not None else [],
    }
    config = ServerConfig.of(TOKENS, extra, engine_id=server, world_size=WORKERS, rank=rank)
    group = KVCacheGroup(["layer"], KVCacheSpec(TOKENS, PAGE))
    return KVStoreSpec(config, KVCacheConfig([group]))


def work(pipe: Connection, server: str, rank: int, folder: Path | None) -> None:
    """A worker: fills blocks, copies, tells what is in a block."""
    layer = torch.zeros(32, PAGE, dtype=torch.uint8)
    worker = ConnectorWorker(spec_of(server, rank, folder))
    worker.register_kv_caches({"layer": layer})
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if isinstance(order, ConnectorMetadata):
            worker.start_transfers(order)
            pipe.send(worker.get_finished())
        elif isinstance(order, tuple):
            layer[order[0]] = order[1]
        else:
            pipe.send(layer[order].unique().tolist())
    worker.shutdown()
    pipe.send("done")


class Workers:
    """The workers' processes."""

    def __init__(self, server: str, folder: Path) -> None:
        self._where = server, folder
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(WORKERS):
            self.start(rank)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def start(self, rank: int) -> None:
        """Start a worker, in the place of the one of its rank."""
        server, folder = self._where
        context = multiprocessing.get_context("forkserver")
        # Torch is imported once.
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, server, rank, folder))
        process.start()
        theirs.close()
        self.pipes[rank : rank + 1] = [ours]
        self.processes[rank : rank + 1] = [process]

    def do(self, meta: ConnectorMetadata) -> ConnectorOutput:
        for pipe in self.pipes:
            pipe.send(meta)
        outputs: Iterator[ConnectorOutput] = (pipe.recv() for pipe in self.pipes)
        first, second = outputs
        return first + second

    def fill(self, block: int, *values: int) -> None:
        for pipe, value in zip(self.pipes, values, strict=True):
            pipe.send((block, value))

    def read(self, block: int) -> list[list[int]]:
        for pipe in self.pipes:
            pipe.send(block)
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
                assert pipe.recv() == "done"
            process.join(PATIENCE)
            pipe.close()


@pytest.fixture
def name() -> str:
    """A name of a server: those of all processes of this machine must differ."""
    return f"test-{uuid.uuid4()}"


@pytest.fixture
def workers(name: str, tmp_path: Path) -> Iterator[Workers]:
    some = Workers(name, tmp_path)
    yield some
    some.end()
    for process in some.processes:
        process.kill()


def test_each_worker_gets_its_own_part_of_a_chunk_back_and_one_that_starts_again_alone_none(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    """What that one copies is told as failed: its memory is not that of the others."""
    server = Server(ConnectorScheduler(spec_of(name, folder=tmp_path)))
    scheduler = server.scheduler
    first, second = Request("a", PROMPT), Request("b", PROMPT)
    for block in range(6):
        workers.fill(1 + block, 10 + block, 20 + block)
    assert server.find(first) == 0
    meta = server.step({first: len(PROMPT)}, new={first: [range(1, 7)]})
    assert scheduler.update_connector_output(workers.do(meta)).loaded == []
    output = workers.do(server.step())
    assert all(count == WORKERS for count in output.completed_jobs.values())
    scheduler.update_connector_output(output)
    assert server.find(second) == len(PROMPT)
    server.load(second, len(PROMPT), range(11, 17))
    ended = scheduler.update_connector_output(workers.do(server.step()))
    assert ended.loaded == ["b"]
    assert [workers.read(11 + block) for block in range(6)] == [
        [[10 + block], [20 + block]] for block in range(6)
    ]
    while scheduler.has_pending_work():
        scheduler.update_connector_output(workers.do(server.step()))
    assert scheduler.manager.stats().tiers[0].chunks == 3, "it is on disk, all parts together"  # type: ignore[attr-defined]
    workers.processes[1].kill()
    workers.processes[1].join(PATIENCE)
    workers.start(1)
    assert workers.pipes[1].recv() == "ready"
    third = Request("c", PROMPT)
    assert server.find(third) == len(PROMPT)
    server.load(third, len(PROMPT), range(21, 27))
    ended = scheduler.update_connector_output(workers.do(server.step()))
    assert (ended.loaded, ended.failed) == ([], ["c"])
    scheduler.shutdown()


def test_a_scheduler_that_comes_before_its_workers_is_told_so() -> None:
    with pytest.raises(KVStoreError, match="not all 2 workers share"):
        ConnectorScheduler(spec_of(f"alone-{uuid.uuid4()}"))


@pytest.mark.parametrize(
    ("server", "rank", "message"),
    [(None, 0, "engine_id = None"), ("s", 2, "rank = 2"), ("s", "1", "rank = '1'")],
)
def test_workers_without_a_place_are_refused(server: str | None, rank: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(server, rank)


def test_a_second_worker_of_one_rank_is_not_taken_for_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.rendezvous.TAKEN_SECONDS", 0.3)
    shape = RegionShape(8, 4096, 0)
    region = share_region(name, WORKERS, shape, 0, 3000)
    try:
        with ThreadPoolExecutor() as pool:
            wrong = [pool.submit(share_region, name, WORKERS, shape, 0, 3000) for _ in range(3)]
        for one in wrong:
            with pytest.raises(ConfigError, match=r"the place 0 \(rank\) of this one"):
                one.result()
        others = [share_region(name, WORKERS, shape, rank, 3000) for rank in (1, 2)]
        assert region.complete
        for other in others:
            other.close()
    finally:
        region.close()


def test_workers_of_other_sizes_are_refused_though_their_rows_are_as_large(name: str) -> None:
    shape = RegionShape(8, 4096, 0)
    region = share_region(name, WORKERS, shape, 0, 3000)
    try:
        with pytest.raises(OtherShapeError, match=r"8x4096x3000 .*, not 8x4096x2000"):
            share_region(name, WORKERS, shape, 1, 2000)
    finally:
        region.close()
