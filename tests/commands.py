"""The command lines that README, docs and the READMEs of folders name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ROOT", "commands_of", "documents", "flags_of"]

ROOT = Path(__file__).resolve().parents[1]

BEGINS = re.compile(r"(python (-m )?\S|kvstore [a-z]|make [a-z])")
"""How a command line begins, at the beginning of a line of code or of a piece of it."""

SCRIPT = re.compile(r"[a-z_]+\.py( |$)")
"""How the table of benchmarks names its scripts."""


def documents() -> list[Path]:
    """Every document of the project that people read, but for tutorials: those run whole."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found += [page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "tutorials"]
    found += [*ROOT.glob("benchmarks/**/README.md"), *ROOT.glob("examples/**/README.md")]
    return sorted(found)


def commands_of(document: Path) -> list[list[str]]:
    """The words of each command line in `document`: of blocks, and of code within the text."""
    text = document.read_text()
    found = []
    for code in _codes(text):
        if SCRIPT.match(code) and document.parent.name == "benchmarks":
            code = f"python benchmarks/{code}"
        if BEGINS.match(code):
            # Words about it stand at the end, after a # or a wide space; [options] are tried, too.
            code = re.split(r"\s#|\s{2,}", code)[0]
            found.append(shlex.split(re.sub(r"[][]", "", code)))
    return found


def _codes(text: str) -> Iterator[str]:
    fenced = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for block in fenced.findall(text):
        yield from (line.strip() for line in block.splitlines())
    text = fenced.sub("", text)
    yield from re.findall(r"^(?:    |\t)(\S.*)$", text, re.MULTILINE)
    for piece in re.findall(r"`([^`]+)`", text):
        yield " ".join(piece.split())


def flags_of(words: list[str]) -> list[str]:
    """The options among `words`, without their values."""
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
