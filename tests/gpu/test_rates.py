"""The benchmark of copies runs: over a pretended device, whose rates mean nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_copy.py"
DRY = ["--dry", "--megabytes", "1", "--pages"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_copy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_copy", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "REPEAT", 1)
    monkeypatch.setattr(module, "ROW_BYTES", 2**20)
    return module


def test_pages_of_every_size_are_copied(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {16: str(2**14), 256: str(2**18)}
    assert script.main([*DRY, *pages.values(), "--json", str(tmp_path / "rates")]) == 0
    out = capsys.readouterr().out
    rates = json.loads((tmp_path / "rates").read_text())
    for page in pages:
        line = rates.pop(f"{page} KiB")
        assert min(line["load"], line["store"], line["load+store"]) > 0
        assert set(line["beside"]) == {"load", "store"}
        assert f"| {page} KiB |" in out
    assert set(rates) == {"device", "one_copy"}


def test_a_job_copies_half_of_the_rows(script: ModuleType) -> None:
    region = script.PinnedRegion.private(4, script.ROW_BYTES)
    bed = script.Bed(script.Machine(dry=True), region, 2**16)
    ticket = bed.job("store")()
    ticket.wait()
    assert ticket.size == 2 * script.ROW_BYTES
    region.close()


def test_when_time_is_up_what_is_left_is_not_measured(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*DRY, "4096", "--seconds", "0"]) == 0
    assert capsys.readouterr().out.count("not measured: time is up") == 1
