"""Which of our parts takes which place, module by module of vLLM's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from .connector import Connectors
from .managers import Managers, Rows
from .policies import Policies
from .specs import Specs
from .workers import Workers

OFFLOAD = "tests.v1.kv_offload."
CONNECTOR = "tests.v1.kv_connector.unit.offloading_connector."

PLACES: dict[str, tuple[str, ...]] = {
    f"{OFFLOAD}cpu.test_manager": ("manager", "policy"),
    f"{OFFLOAD}cpu.policies.test_factory": ("policy",),
    f"{OFFLOAD}cpu.test_gpu_worker": ("worker",),
    f"{OFFLOAD}tiering.test_tiering_offloading": ("tiering",),
    f"{OFFLOAD}test_factory": ("spec",),
    f"{CONNECTOR}test_scheduler": ("connector", "manager"),
    f"{CONNECTOR}test_events": ("connector", "manager"),
    f"{CONNECTOR}test_metrics": ("connector",),
    f"{CONNECTOR}test_worker": ("spec",),
}


@contextmanager
def put(place: str, module: ModuleType, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our parts in a place for one test; gives who counts what was built of them."""
    parts = MAKERS[place]()

    def give(name: str, part: Any) -> None:
        if hasattr(module, name):
            patch.setattr(module, name, part)

    if place == "manager":
        give("CPUOffloadingManager", parts.cpu)
        give("LRUCachePolicy", object)
        give("ARCCachePolicy", object)
        if hasattr(module, "verify_store_output"):
            rows = Rows(module.to_keys)
            give("verify_store_output", rows.verify_store)
            give("verify_load_output", rows.verify_load)
    elif place == "tiering":
        give("CPUPrimaryTierOffloadingManager", parts.primary)
        give("TieringOffloadingManager", parts.tiering)
    elif place == "policy":
        give("CPUOffloadingManager", parts.manager)
        give("LRUCachePolicy", parts.named("lru"))
        give("ARCCachePolicy", parts.named("arc"))
        give("_DummyCachePolicy", parts.named("lru"))
    elif place == "worker":
        give("CPUOffloadingWorker", parts.worker)
    elif place == "spec":
        give("SingleArgExternalOffloadingSpec", parts.spec)
        give("BareExternalOffloadingSpec", parts.spec)
    elif place == "connector":
        _below_runners(parts, patch)
    yield parts
    parts.close()


MAKERS: dict[str, Callable[[], Any]] = {
    "manager": Managers,
    "tiering": Managers,
    "policy": Policies,
    "connector": Connectors,
    "worker": Workers,
    "spec": Specs,
}


def _below_runners(parts: Connectors, patch: pytest.MonkeyPatch) -> None:
    from tests.v1.kv_connector.unit.offloading_connector import (  # type: ignore[import-not-found]
        utils,
    )

    begin = utils.RequestRunner.__init__

    def runner(self: Any, *args: Any, **kwargs: Any) -> None:
        parts.built += 1
        begin(self, *args, **kwargs)
        parts.put(self, self.offloading_spec)

    def get_worker(self: Any, kv_caches: Any) -> Any:
        self.handler = parts.worker(self, kv_caches)
        return self.handler

    patch.setattr(utils.RequestRunner, "__init__", runner)
    patch.setattr(utils.MockOffloadingSpec, "get_worker", get_worker)
