"""Beside another connector, in vLLM's MultiConnector: what it loads, or fails to load."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.scheduler import Scheduler

from kvstore.vllm.connector import KVStoreConnector
from tests.vllm.whole import BLOCK, Server, _marks

PROMPT, OTHER = [(3 * n + 1) % 90 for n in range(40)], [(7 * n + 5) % 90 for n in range(40)]


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What is to be loaded: requests, from which token to which, into which blocks."""

    loads: list[tuple[str, int, int, list[int]]] = field(default_factory=list)


class Partner(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Has the beginning of some prompts, and stores nothing.

    Attributes:
        has: how many tokens of the prompts of each request.
        late: whether it loads between steps.
    """

    has: ClassVar[dict[str, int]] = {}
    late = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, int] = {}
        self._loads: list[tuple[str, int, int, list[int]]] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        self._asked[request.request_id] = computed
        more = max(0, self.has.get(request.request_id, 0) - computed)
        return more, more > 0 and self.late

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            name, (its,) = request.request_id, blocks.get_block_ids()
            first = self._asked[name]
            self._loads.append((name, first, first + tokens, list(its)))

    def build_connector_meta(self, output: Any) -> Loads:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *told: Any, **more: Any) -> None: ...
    def wait_for_layer_load(self, *told: Any) -> None: ...
    def save_kv_layer(self, *told: Any, **more: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class Patient:
    """A worker that begins stores only when somebody waits for them, or says so.

    Attributes:
        waited: whether somebody has waited for some.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self._stores: list[Any] = []
        self.waited = False

    def submit_store(self, *told: Any, **more: Any) -> bool:
        self._stores.append((told, more))
        return True

    def wait(self, jobs: Any) -> None:
        self.waited |= bool(self._stores)
        self.begin()
        self._real.wait(jobs)

    def begin(self) -> None:
        while self._stores:
            told, more = self._stores.pop(0)
            self._real.submit_store(*told, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Beside(Server):
    """A server with a `Partner` that fails to load what `fails` names, from that token on."""

    def __init__(self, folder: Path, policy: str, **more: Any) -> None:
        self.policy, self.fails = policy, dict[str, int]()
        self.kind = self._scheduler
        super().__init__(folder, {"host": "1MiB"}, **more)

    def _scheduler(self, config: Any, groups: Any, *rest: Any, **more: Any) -> Scheduler:
        both, own = copy.copy(config), config.kv_transfer_config
        ours = {
            "kv_connector": own.kv_connector,
            "kv_connector_module_path": own.kv_connector_module_path,
            "kv_role": "kv_both",
            "kv_connector_extra_config": own.kv_connector_extra_config,
        }
        theirs = ours | {
            "kv_connector": "Partner",
            "kv_connector_module_path": __name__,
            "kv_connector_extra_config": {},
        }
        both.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=self.policy,
            engine_id=own.engine_id,
            kv_connector_extra_config={"connectors": [ours, theirs]},
        )
        return Scheduler(both, groups, *rest, **more)

    def ours(self, scheduler: Scheduler) -> Any:
        connectors: Any = scheduler.connector
        return next(one for one in connectors._connectors if isinstance(one, KVStoreConnector))

    def _execute(self, output: Any) -> Any:
        output.kv_connector_metadata, self.partner = output.kv_connector_metadata.metadata
        self.invalid: set[int] = set()
        told = super()._execute(output)
        self.excused.clear()
        report = told.kv_connector_output
        arrived = {name for name, *_ in self.partner.loads if Partner.late}
        report.finished_recving = (report.finished_recving or set()) | arrived
        report.invalid_block_ids = self.invalid
        if report.kv_connector_worker_meta is not None:
            report.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
                (report.kv_connector_worker_meta, None)
            )
        return told

    def _compute(self, output: Any) -> list[list[int]]:
        pages = self.pages.view(torch.int64)
        for name, first, end, blocks in self.partner.loads:
            marks = _marks(list(self.requests[name].all_token_ids))
            for place in range(first, end):
                wrong = place >= self.fails.get(name, end)
                pages[blocks[place // BLOCK], place % BLOCK] = -1 if wrong else marks[place]
                if wrong:
                    self.invalid.add(blocks[place // BLOCK])
                    self.excused.add(name)
        return super()._compute(output)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[Server] = []

    def make(policy: str = "fail", **more: Any) -> Server:
        opened.append(Beside(tmp_path, policy, **more))
        return opened[-1]

    monkeypatch.setattr(Partner, "has", {})
    monkeypatch.setattr(Partner, "late", False)
    yield make
    for server in opened:
        server.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_another_connector_could_not_load_is_not_kept(beside: Any, policy: str) -> None:
    """It is known only when the store of the same step has been ordered."""
    server = beside(policy)
    Partner.has["r0"] = 16
    server.fails["r0"] = 8
    name = server.add(PROMPT)
    while not server.requests[name].is_finished():
        server.step()
    server.settle()
    server.forget()
    (again,) = server.serve(PROMPT)
    # It was computed again, and stored then.
    assert again.cached == (39 if policy == "recompute" else 0)


def test_another_connector_loads_into_no_block_that_is_still_to_be_stored(beside: Any) -> None:
    Partner.late = True
    Partner.has["r1"] = 36
    # The second prompt gets the blocks of the first.
    server = beside(blocks=13)
    server.worker.worker = Patient(server.worker.worker)
    first = server.add(PROMPT, tokens=1)
    second = server.add(OTHER)
    while not all(server.requests[name].is_finished() for name in (first, second)):
        server.step()
    assert server.worker.worker.waited, "its blocks were not those of the first"
    server.worker.worker.begin()
    server.settle()
    server.forget()
    # It fails where a token is wrong.
    (again,) = server.serve(PROMPT)
    assert again.cached == 39
