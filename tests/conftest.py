"""Which tests run where, when several workers share them out (`pytest -n`)."""

from __future__ import annotations

import ast
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.core.chunk import Life

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xdist.remote import Producer  # type: ignore[import-untyped]
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    from tests.exported import Exported

_parse = ast.parse


def _parse_again(*args: Any, **named: Any) -> Any:
    """CPython 3.11 miscounts where two threads parse at once (gh-106905); the next try is right."""
    try:
        return _parse(*args, **named)
    except SystemError:
        return _parse(*args, **named)


ast.parse = _parse_again

ENGINES = ["engine", "policies", "reset", "identity", "hints", "pause", "launcher"]
MORE_ENGINES = ["identity_matrix", "turmoil", "shapes", "secondary", "remote"]
SELDOM = ["observed", "hybrid", "hanging_disk", "control", "gate", "tenants", "worker"]
if "KVSTORE_VLLM" not in os.environ:
    # Where all else runs, too, the other worker has enough to do, and needs no launchers.
    ENGINES += [*MORE_ENGINES, *SELDOM]
ENGINES = [f"tests/vllm/test_{name}.py" for name in ENGINES]
"""They share launchers, and some of them an engine to compare with: one worker runs them all."""

FIRST = [
    *ENGINES,
    "tests/vllm/test_turmoil.py",
    "tests/vllm/test_hybrid.py",
    "tests/vllm/test_observed.py",
    "tests/vllm/test_hanging_disk.py",
    "tests/test_commands.py",
    "tests/test_tutorials.py",
    "tests/tiers/remote/test_mooncake.py",
    "tests/tiers/remote/test_object.py",
    "tests/world/test_world.py",
    "tests/core/test_simulation.py",
    "tests/faults/test_io_errors.py",
    "tests/faults/test_frozen.py",
    "tests/tiers/test_fuzz.py",
    "tests/examples/test_http_server.py",
    "tests/examples/test_paged_engine.py",
]
"""What takes longest begins first, so that no worker is left alone with it at the end."""


# What the tables of a chunk's life lack is an error here; in service it is counted.
Life.raises = True


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    """An SDK of OpenTelemetry that keeps what is exported, for one test alone."""
    pytest.importorskip("opentelemetry.sdk")
    from tests.exported import exporting

    yield from exporting(monkeypatch)


ENGINE_SECONDS = 900
"""A real engine computes a prompt in half a second on one processor, and in seven on another."""


def pytest_collection_finish() -> None:
    """Collections look at what tests make, not at ten thousand tests and what they import."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Some libraries count what is never collected as leaked, and say so."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_SECONDS))
    rank = {config.rootpath / path: number for number, path in reversed([*enumerate(FIRST)])}
    items.sort(key=lambda item: rank.get(Path(item.path), len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """The tests of one file share a worker, unless `--dist` says otherwise."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "load":
        return None

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return ENGINES[0] if path in ENGINES else path

    return ByFile(config, log)
