"""Importing kvstore is light, imports point one way, and a shadowed sibling is named."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvstore
from tests.patience import PATIENCE

HOME = Path(kvstore.__file__).resolve().parent.parent

FOLDERS = ("kvstore", "tiers", "policies", "tools")
"""Imported as kvstore, kvstore.tiers, kvstore.policies and kvstore.tools."""

IMPORT_SECONDS = 0.3


def run(
    code: str, cwd: Path, *options: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=check,
    )


# -- light -----------------------------------------------------------------------------------


def test_importing_kvstore_takes_no_time_to_speak_of(tmp_path: Path) -> None:
    code = (
        "import time; start = time.perf_counter(); import kvstore; "
        "print(time.perf_counter() - start)"
    )
    best = min(float(run(code, tmp_path).stdout) for _ in range(5))
    assert best < IMPORT_SECONDS


HEAVY = ("torch", "vllm", "transformers", "hypothesis", "pytest")


@pytest.mark.parametrize(
    "code",
    [
        "import kvstore",
        "import kvstore; kvstore.open, kvstore.Store, kvstore.Config, kvstore.KVStoreError",
        "import kvstore; kvstore.open_sync, kvstore.SyncStore",
        "import kvstore.core, kvstore.engine.engine, kvstore.assembly",
        "import kvstore.connector.manager, kvstore.connector.backend, kvstore.connector.reuse",
        "import kvstore.connector.spec, kvstore.connector.handler, kvstore.connector.mediums",
        "import kvstore.connector.scheduler, kvstore.connector.worker, kvstore.connector.server",
        "import kvstore.tiers, kvstore.tiers.disk, kvstore.policies",
        "import kvstore.tools.cli",
    ],
)
def test_nothing_heavy_is_imported_along(tmp_path: Path, code: str) -> None:
    loaded = json.loads(
        run(f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))", tmp_path).stdout
    )
    assert "kvstore" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []


def test_importing_kvstore_imports_no_part_of_it_that_is_not_asked_for(tmp_path: Path) -> None:
    code = "import kvstore, sys; print(*sorted(n for n in sys.modules if n.startswith('kvstore')))"
    loaded = run(code, tmp_path).stdout.split()
    assert set(loaded) == {
        "kvstore",
        "kvstore._version",
    }


def test_every_public_name_can_be_had() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    assert set(kvstore.__all__) <= set(dir(kvstore))
    # A type checker refuses it as well: mypy would tell that the comment is not needed.
    with pytest.raises(AttributeError, match="module 'kvstore' has no attribute 'opne'"):
        kvstore.opne  # type: ignore[attr-defined]  # noqa: B018


# -- one way ---------------------------------------------------------------------------------


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((HOME / folder).rglob("*.py"))


@cache
def imports_of(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, wherever it stands."""
    return list(found_in(file))


def found_in(file: Path) -> Iterator[tuple[int, str]]:
    package = ".".join(file.relative_to(HOME).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import from {package}"
            assert node.module is not None
            yield node.lineno, node.module
            # `from kvstore import types` imports kvstore.types.
            if node.module == "kvstore":
                for alias in node.names:
                    if list((HOME / "kvstore").glob(f"{alias.name}*")):
                        yield node.lineno, f"{node.module}.{alias.name}"


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def strangers(folder: str, *allowed: str) -> list[str]:
    """Imports of our own packages, in a folder, that are not among those allowed."""
    return [
        f"{file.relative_to(HOME)}:{line} imports {module}"
        for file in sources(folder)
        for line, module in imports_of(file)
        if module.split(".")[0] == "kvstore" and not within(module, allowed)
    ]


def test_the_search_for_imports_finds_some() -> None:
    found = {module for file in sources("tiers") for _, module in imports_of(file)}
    assert {"numpy", "kvstore.types", "kvstore.errors", "kvstore.tiers.base"} <= found
    assert strangers("tiers", "kvstore.tiers") != []


def test_tiers_know_only_what_all_share_and_the_table_of_policies() -> None:
    shared = ("kvstore.types", "kvstore.errors", "kvstore.concurrency")
    known = ("kvstore.tiers", *shared, "kvstore.policies.table")
    assert strangers("tiers", *known) == []


def test_policies_know_nothing_but_the_standard_library() -> None:
    foreign = [
        f"{file.relative_to(HOME)}:{line} imports {module}"
        for file in sources("policies")
        for line, module in imports_of(file)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not within(module, ("kvstore.policies",))
    ]
    assert foreign == []


def test_the_core_does_no_io_and_knows_no_clock() -> None:
    assert strangers("kvstore/core", "kvstore.core", "kvstore.types", "kvstore.policies") == []
    forbidden = {"asyncio", "concurrent", "io", "logging", "mmap", "multiprocessing", "os"}
    forbidden |= {"pathlib", "queue", "select", "signal", "socket", "ssl", "subprocess"}
    forbidden |= {"sched", "tempfile", "threading", "time", "numpy", "uvloop"}
    found = {
        f"{file.relative_to(HOME)}:{line} imports {module}"
        for file in sources("kvstore/core")
        for line, module in imports_of(file)
        if module.split(".")[0] in forbidden
    }
    assert found == set()
    calls = {
        f"{file.relative_to(HOME)}:{node.lineno}"
        for file in sources("kvstore/core")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith))
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("open", "print"))
    }
    assert calls == set()


def test_kvstore_knows_nothing_of_the_command() -> None:
    for file in sources("kvstore", "tiers", "policies"):
        for line, module in imports_of(file):
            assert not within(module, ("kvstore.tools",)), f"{file.relative_to(HOME)}:{line}"


def graph() -> dict[str, set[str]]:
    """For each module of ours those that it imports at its head, types alone excepted."""
    names = {}
    for file in sources(*FOLDERS):
        parts = file.relative_to(HOME).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        names[name if parts[0] == "kvstore" else f"kvstore.{name}"] = file
    found: dict[str, set[str]] = {}
    for name, file in names.items():
        found[name] = set()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                found[name] |= inner or ({node.module} & names.keys())
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, if there is one."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for other in sorted(edges[name]):
                if around := search(other, [*path, name]):
                    return around
            done.add(name)
        return []

    for name in edges:
        if around := search(name, []):
            return around
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = graph()
    assert len(edges) > 150
    assert sum(map(len, edges.values())) > 500
    assert circle(edges) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("server", ["vllm", "sglang", "lmcache"])
def test_a_server_is_known_only_to_the_room_of_its_name(server: str) -> None:
    room = HOME / "kvstore" / server
    for file in sources(*FOLDERS):
        if room in file.parents or file == room.with_suffix(".py"):
            continue
        for line, module in imports_of(file):
            place = f"{file.relative_to(HOME)}:{line}"
            assert not within(module, (server, f"kvstore.{server}")), place


def test_test_tools_are_known_only_to_the_published_suites() -> None:
    for file in sources(*FOLDERS):
        if (HOME / "kvstore" / "testing") in file.parents:
            continue
        for line, module in imports_of(file):
            place = f"{file.relative_to(HOME)}:{line}"
            assert not within(module, ("pytest", "hypothesis", "tests", "kvstore.testing")), place


def test_torch_is_imported_only_where_it_is_used() -> None:
    """At the head of a module it would be imported along; three rooms are about it."""
    rooms = {HOME / "kvstore" / name for name in ("vllm", "device", "sglang")}
    for file in sources(*FOLDERS):
        if rooms & {*file.parents}:
            continue
        head = ast.parse(file.read_text()).body
        names = [a.name for node in head if isinstance(node, ast.Import) for a in node.names]
        names += [node.module or "" for node in head if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if within(name, ("torch",))], file


# -- beside others ---------------------------------------------------------------------------


def test_a_project_with_folders_of_the_same_names_imports_kvstore(tmp_path: Path) -> None:
    for name in ("tools", "tiers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("ours = True\n")
    (tmp_path / "policies.py").write_text("ours = True\n")
    code = (
        "import kvstore, kvstore.tiers.disk, kvstore.policies, kvstore.tools.cli\n"
        "import tools, tiers, policies\n"
        "print(tools.ours and tiers.ours and policies.ours)"
    )
    assert run(code, tmp_path).stdout == "True\n"


@pytest.mark.parametrize("name", ["tiers", "policies", "tools"])
def test_a_folder_of_the_repository_is_not_imported_by_its_own_name(name: str) -> None:
    ended = run(f"import {name}", HOME, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: import kvstore.{name}, not {name}")


def test_kvstore_can_be_imported_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "unrelated").mkdir()
    assert run("import kvstore; print(kvstore.__version__)", tmp_path).stdout.strip()
