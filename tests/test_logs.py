"""Records of the log name what happened and what it was about, for who searches logs."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.observe.logs import warn_with
from kvstore.types import LogLine, about
from tests.store.support import keys_of, payloads, small

HOME = Path(__file__).resolve().parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

KEYS = keys_of("prompt", 4)


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for folder in ("kvstore", "tiers", "policies", "tools"):
        for file in sorted((HOME / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield file, node


def writes_a_record(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in LEVELS
        and isinstance(function.value, ast.Name)
        and function.value.id == "logger"
    )


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def events() -> set[str]:
    """Every event that the source names, as a text or as the end of one of a tier."""
    found: set[str] = set()
    for file, call in calls():
        if not call.args or not isinstance(call.args[0], ast.Constant):
            continue
        event = str(call.args[0].value)
        if name_of(call) in ("about", "LogLine"):
            found.add(event)
        elif name_of(call) == "_line" and file.name == "health.py":
            found.add(f"tier.{event}")
    return found


def test_every_record_names_its_event() -> None:
    records = [(file, call) for file, call in calls() if writes_a_record(call)]
    assert len(records) > 50
    for file, call in records:
        (extra,) = [each.value for each in call.keywords if each.arg == "extra"]
        assert isinstance(extra, ast.Call), f"{file}:{call.lineno}"
        assert name_of(extra) == "about", f"{file}:{call.lineno}"


def test_the_table_of_events_is_that_of_the_source() -> None:
    text = (HOME / "docs" / "watching.md").read_text()
    table = text[text.index("| event |") :]
    told = re.findall(r"`([a-z]+\.[a-z_]+)`", "\n".join(re.findall(r"^\| (.*?) \|", table, re.M)))
    assert sorted(told) == sorted(set(told))
    assert set(told) == events()


def test_what_a_record_names_is_a_number_or_text() -> None:
    assert about("tier.away", error=OSError(5, "no"), seconds=1.5, path=Path("/x"), whole=True) == {
        "kvstore.event": "tier.away",
        "kvstore.error": "[Errno 5] no",
        "kvstore.seconds": 1.5,
        "kvstore.path": "/x",
        "kvstore.whole": True,
    }


def test_a_line_of_the_core_is_a_warning_as_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    warn_with(logging.getLogger("kvstore"))(LogLine("tier.away", "100 % away", {"tier": "disk"}))
    (record,) = caplog.records
    assert record.getMessage() == "100 % away"
    assert record.__dict__["kvstore.tier"] == "disk"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What kvstore logs, as JSON, by the package that servers use for it."""
    formatter = pytest.importorskip("pythonjsonlogger.json").JsonFormatter(
        "%(levelname)s %(message)s"
    )
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("kvstore")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_damaged_chunk_and_the_opening_are_lines_of_json(
    tmp_path: Path, lines: io.StringIO
) -> None:
    async def serve() -> None:
        async with kvstore.open(small(tmp_path, rows=4, disk=32)) as store:
            for keys in (KEYS, keys_of("another", 4)):
                await store.put(keys, payloads(keys))
                await store.flush()
            (segment,) = tmp_path.rglob("segment-*.safetensors")
            with segment.open("r+b") as file:
                file.seek(segment.read_bytes().index(payloads(KEYS)[1]))
                file.write(b"damage")
            assert await store.resolve(KEYS) == 1

    asyncio.run(serve())
    told: list[dict[str, Any]] = [json.loads(line) for line in lines.getvalue().splitlines()]
    by_event = {line["kvstore.event"]: line for line in told}
    opened, fault = by_event["store.opened"], by_event["fault.begun"]
    assert opened["levelname"] == "INFO"
    assert opened["kvstore.description"].startswith("host 16.0 KiB")
    assert fault["levelname"] == "WARNING"
    assert fault["kvstore.what"].startswith("promote")
    assert fault["kvstore.failures"] == 1
    assert str(tmp_path) in fault["kvstore.tier"]
    assert "do not hold what their records say" in fault["message"]
