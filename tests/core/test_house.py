"""How the core is laid out: no object writes another's state; and how long modules may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore.core

FOLDER = Path(kvstore.core.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
MOST_LINES = 450


def assigned(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, owner and attribute of every assignment to, or deletion of, an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.lineno, ast.unparse(node.value), node.attr


def classes_of(tree: ast.AST) -> set[str]:
    """The names that stand for objects of this module's classes: ``_Chain`` is a ``chain``."""
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name.strip("_").lower() for name in names}


def foreign(source: str) -> list[tuple[int, str, str]]:
    """Assignments to attributes of objects whose class is of another module."""
    tree = ast.parse(source)
    own = {"self", *classes_of(tree)}
    return [
        each for each in assigned(tree) if each[1] not in own and not each[1].startswith("Life")
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_an_object_of_the_core_writes_only_itself(module: Path) -> None:
    assert foreign(module.read_text()) == []


def test_writing_another_object_is_noticed() -> None:
    assert foreign("class Pool:\n    def f(self, chunk):\n        chunk.state = self.x = 1\n")
    assert foreign("class Pool:\n    def f(self):\n        self.tier.stalled += 1\n")
    assert not foreign("class Chunk: ...\ndef f(chunk):\n    chunk.state = 1\n")


def test_a_module_is_short_or_says_why_not() -> None:
    """Also outside of the core."""
    home = FOLDER.parent
    folders = [home, *(home / name for name in ("tiers", "policies", "tools"))]
    modules = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    assert len(modules) > 180
    long = []
    for module in modules:
        source = module.read_text()
        told = ast.get_docstring(ast.parse(source)) or ""
        if len(source.splitlines()) > MOST_LINES and "This module is long because" not in told:
            long.append(module.name)
    assert long == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_nothing_in_the_core_asks_what_kind_of_tier_it_has(module: Path) -> None:
    tree = ast.parse(module.read_text())
    kinds = {"OwnedTier", "PeerTier", "TierView", "CopyTarget"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            assert not kinds & {ast.unparse(arg) for arg in node.args}


def test_the_core_imports_no_io_no_clock_and_no_thread() -> None:
    banned = {"asyncio", "os", "threading", "time", "socket", "pathlib", "io"}
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not banned & {name.split(".")[0] for name in names}, module.name
