"""The pytest plugin that runs vLLM's tests with our parts in place: `-p native.plugin`.

Each test runs once for each place that its module has (`places.PLACES`), and its id ends in the
place. A test in which no part of ours was built says nothing of us, and is not counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from .places import PLACES, put

OUTCOMES: dict[str, dict[str, Any]] = {}
"""Test -> its place, whether ours took part, how it ended and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    places = PLACES.get(metafunc.module.__name__, ())
    if "connector" in places:
        # What has a connector of its own has no other place for a manager.
        has_connector = "request_runner" in metafunc.fixturenames
        places = tuple(place for place in places if (place == "connector") is has_connector)
    metafunc.parametrize("place", places, indirect=True, scope="function")


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with put(request.param, request.module, monkeypatch) as parts:
        try:
            yield request.param
        finally:
            request.node.stash[TAKES_PART] = parts.built > 0


TAKES_PART = pytest.StashKey[bool]()


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    """As vLLM's own tests have it."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    report = (yield).get_result()
    name = item.nodeid.removeprefix("tests/v1/")
    entry = OUTCOMES.setdefault(name, {"outcome": "passed", "why": "", "text": ""})
    entry["place"] = str(item.callspec.params["place"]) if hasattr(item, "callspec") else ""
    if report.skipped and entry["outcome"] == "passed":
        entry["outcome"], entry["why"] = "skipped", str(report.longrepr[2])
    if report.failed:
        entry["outcome"] = "failed"
        entry["why"] = call.excinfo.exconly() if call.excinfo else ""
        entry["text"] += report.longreprtext
    if report.when == "teardown":
        entry["takes_part"] = item.stash.get(TAKES_PART, False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["KVSTORE_OUTCOMES"]).write_text(json.dumps(OUTCOMES))
