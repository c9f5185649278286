"""The code in docs/ runs as it stands."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.observe.metrics.table import METRICS
from tests.commands import ROOT, documents

DOCS = Path(__file__).resolve().parents[1] / "docs"


async def test_the_independent_reader_of_the_format_reads_a_lane(tmp_path: Path) -> None:
    keys = [b"key-%d" % index + b"\0\0\0\0" for index in range(20)]
    config = {
        "cpu_bytes_to_use": "2MiB",
        "chunk_bytes": 5000,
        "identity": {"model": "m"},
        "tiers": [
            {
                "type": "disk",
                "path": str(tmp_path),
                "capacity_bytes": "1MiB",
                "segment_bytes": "100KiB",
            }
        ],
    }
    async with kvstore.open(config) as store:
        await store.put(keys, [bytes([index]) * 5000 for index in range(20)])
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "format.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) < 40
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) == {
        "sys",
        "pathlib",
        "numpy",
        "safetensors",
    }
    (lane,) = tmp_path.glob("*/lane-0")
    done = subprocess.run(
        [sys.executable, "-c", code, str(lane)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert told == {
        key.hex(): ["5000", (bytes([index]) * 8).hex()] for index, key in enumerate(keys)
    }


def test_the_program_of_the_connector_runs_as_it_stands() -> None:
    pytest.importorskip("torch")
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "connector.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["[True]", "10", "[True]", "True", ""]


def test_the_program_without_asyncio_runs_as_it_stands() -> None:
    text = (DOCS / "library.md").read_text().split("## Without asyncio")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 0, 0, 0]\n[8, 8, 8, 8]\n"


def test_the_picture_of_ratios_is_drawn_from_the_table_of_the_readme() -> None:
    program = runpy.run_path(str(DOCS / "ratios.py"))
    rows = program["rows_of"]((DOCS.parent / "README.md").read_text())
    assert len(rows) >= 8
    assert program["draw"](rows) == (DOCS / "ratios.svg").read_text(), "run python docs/ratios.py"


def test_the_reasons_of_a_miss_name_metrics_that_there_are() -> None:
    text = (DOCS / "watching.md").read_text().split("## Why a lookup was a miss")[1]
    rows = re.findall(r"^\| .+ \| (.+) \|$", text.split("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 10
    assert named <= {metric.name for metric in METRICS}


def test_the_tables_of_a_chunks_life_are_those_of_the_code() -> None:
    program = runpy.run_path(str(DOCS / "life.py"))
    text = (DOCS / "design.md").read_text()
    assert program["page"](text) == text, "run python docs/life.py"


def test_the_way_of_one_key_names_functions_that_there_are() -> None:
    text = (DOCS / "design.md").read_text()
    walk = text.split("### The way of one key")[1].split("\n### ")[0]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", walk)
    assert len(named) > 30
    folder = Path(kvstore.__file__).parent
    parts = ("api", "core", "engine", "tiers/disk")
    sources = [path for part in parts for path in (folder / part).rglob("*.py")]
    sources.append(folder / "tiers" / "base.py")
    tree = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    methods = {
        (cls.name, function.name)
        for cls in tree
        if isinstance(cls, ast.ClassDef)
        for function in cls.body
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [f"{cls}.{name}" for cls, name in named if (cls, name) not in methods] == []


def test_every_module_of_the_core_is_in_the_table() -> None:
    text = (DOCS / "design.md").read_text()
    rooms = text.split("### Its modules")[1].split("### The life")[0]
    told = set(re.findall(r"`(\w+)`", rooms))
    modules = {path.stem for path in (Path(kvstore.__file__).parent / "core").rglob("*.py")}
    assert modules - {"__init__"} == told


def anchors(page: Path) -> set[str]:
    """What links may name in a page: its headings, as GitHub writes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text()):
        if not name.startswith("http"):
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), name
            assert not anchor or anchor[1:] in anchors(target), f"{name}{anchor}"


def test_every_entry_of_the_bugs_has_tests_that_exist() -> None:
    root = DOCS.parent
    entries = re.split(r"\n\*\*", (DOCS / "bugs.md").read_text())[1:]
    assert len(entries) >= 15
    for entry in entries:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", entry)
        assert named, f"no test: {entry[:60]}"
        for file, name in named:
            assert f"def {name}(" in (root / file).read_text(), f"{file} has no {name}"
        assert len(entry.strip().split("\n\n## ")[0].splitlines()) <= 6, entry[:60]
