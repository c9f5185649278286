"""What importing costs, and which way imports point."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def test_importing_kvstore_imports_neither_torch_nor_vllm_nor_numpy() -> None:
    done = python(
        "import sys, kvstore; print([n for n in ('torch', 'vllm', 'numpy') if n in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_using_kvstore_as_a_library_imports_neither_torch_nor_vllm() -> None:
    done = python(
        "import sys, kvstore; kvstore.Store, kvstore.Config;"
        "print([n for n in ('torch', 'vllm') if n in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def imports(path: Path) -> Iterator[str]:
    """Full names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""


OURS = ("kvstore", "tiers", "policies", "tools")


def ours(name: str) -> bool:
    return name.split(".")[0] in OURS


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("policies", ("policies",)),
        ("tiers", ("tiers", "kvstore.types", "kvstore.errors")),
        ("kvstore/core", ("kvstore.core", "kvstore.types", "policies")),
        ("kvstore", ("kvstore", "tiers", "policies")),
        ("tools", ("tools", "kvstore")),
    ],
)
def test_imports_point_one_way(folder: str, allowed: tuple[str, ...]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            if ours(name):
                assert any(name == one or name.startswith(one + ".") for one in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_policies_need_the_standard_library_only() -> None:
    for path in (ROOT / "policies").rglob("*.py"):
        for name in imports(path):
            assert ours(name) or name.split(".")[0] in sys.stdlib_module_names, f"{path}: {name}"


def test_the_core_does_no_io_and_knows_no_time_thread_or_loop() -> None:
    banned = {"asyncio", "threading", "time", "os", "io", "mmap", "socket", "pathlib", "numpy"}
    for path in (ROOT / "kvstore" / "core").rglob("*.py"):
        assert not banned & {name.split(".")[0] for name in imports(path)}, path


def test_vllm_is_imported_below_kvstore_vllm_only() -> None:
    for folder in OURS:
        for path in (ROOT / folder).rglob("*.py"):
            if ROOT / "kvstore" / "vllm" not in path.parents:
                assert "vllm" not in {name.split(".")[0] for name in imports(path)}, path


def test_a_folder_that_shadows_a_sibling_package_is_named(tmp_path: Path) -> None:
    shadow = tmp_path / "tiers"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("")
    done = python("import kvstore", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "ShadowedPackageError" in last
    assert str(ROOT / "tiers") in last
    assert str(shadow / "__init__.py") in last
