"""The source distribution and the wheel: what they hold, and that they work without the clone."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.copied import copy_project
from tests.patience import PATIENCE
from tests.sanitize import MODULES, build

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("kvstore", "tiers", "policies", "tools")

LINKED = ("tiers", "policies", "tools")
"""Imported below kvstore."""

BESIDE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "NOTICE", "PKG-INFO", "README.md"}
BESIDE |= {"SECURITY.md", "pyproject.toml", "setup.cfg"}


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=environment.pop("cwd", str(ROOT)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    place = tmp_path_factory.mktemp("dist")
    # A copy: what a build leaves in a source tree shall not lie in this one.
    source = place / "source"
    built_here = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=built_here)
    for name in (*BESIDE - {"PKG-INFO", "setup.cfg"}, "tests/test_distribution.py"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "-q", "--no-isolation", "-o", str(place), str(source))
    (archive,), (wheel,) = place.glob("*.tar.gz"), place.glob("*.whl")
    return archive, wheel


def modules() -> set[str]:
    """The sources of the packages, as they are called in a wheel."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".pyi") or path.name == "py.typed":
                name = path.relative_to(ROOT).as_posix()
                found.add(f"kvstore/{name}" if package in LINKED else name)
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_a_wheel_holds_each_module_once_the_compiled_parts_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
    compiled = {name for name in names if name.endswith(".so")}
    assert set(names) - compiled == modules()
    assert len(names) == len(set(names))
    stems = {name.partition(".")[0] for name in compiled}
    assert stems == {
        "kvstore/policies/_table",
        "kvstore/tiers/_codec",
        "kvstore/tiers/disk/io/_aio",
    }
    assert "cp311-abi3-linux" in built[1].name


def test_a_source_distribution_holds_what_builds_it_and_no_tests(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[0]) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    sources = {n for n in names if not n.startswith("kvstore_offload.egg-info/")}
    assert {n for n in sources if not n.startswith("kvstore/")} == BESIDE
    assert modules() <= sources


def test_the_metadata_name_the_licence_and_the_distribution(built: tuple[Path, Path]) -> None:
    told = metadata(built[1])
    assert told["Name"] == "kvstore-offload"
    assert told["License-Expression"] == "Apache-2.0"
    assert told.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_an_installed_wheel_stores_and_finds_and_its_command_runs(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "-qq", "install", "--no-deps", "--target", str(site)]
    run(*pip, str(built[1]))
    code = f"""
import asyncio, kvstore, kvstore.policies._table, kvstore.tiers.disk.io._aio
assert kvstore.__file__.startswith({str(site)!r}), kvstore.__file__
assert kvstore.tiers.disk.io._aio.__file__.startswith({str(site)!r})
config = {{
    "cpu_bytes_to_use": "1MiB", "chunk_bytes": "64KiB", "identity": {{"model": "m"}},
    "tiers": [{{"type": "disk", "path": {str(tmp_path / "kv")!r}, "capacity_bytes": "512MiB"}}],
}}
async def main():
    async with kvstore.open(config) as store:
        await store.put([b"k" * 36], [b"v" * 65536])
    async with kvstore.open(config) as store, store.get([b"k" * 36]) as chunks:
        assert bytes(chunks[0]) == b"v" * 65536
asyncio.run(main())
"""
    run(sys.executable, "-c", code, PYTHONPATH=str(site), cwd=str(tmp_path))
    shown = run(
        str(site / "bin" / "kvstore"),
        "inspect",
        str(tmp_path / "kv"),
        PYTHONPATH=str(site),
        cwd=str(tmp_path),
    )
    assert re.search(r"\n +0 +- +1 ", shown), shown


def test_what_is_written_in_c_builds_for_the_sanitizers_and_without_a_warning(
    tmp_path: Path,
) -> None:
    """So that `make sanitize`, which takes minutes, can begin."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    copy_project(tmp_path, compiled=False)
    build(tmp_path)
    assert all(list(tmp_path.glob(f"{module}.*.so")) for module in MODULES)
