"""Pages of the site that lie beside docs/: README files that pages link to.

mkdocs calls these functions by their names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "examples/http_server/README.md": "project/http_server.md",
    "examples/paged_engine": "project/paged_engine.md",
    "examples/kubernetes/README.md": "project/kubernetes.md",
}
"""Where each of them stands in the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def _source(name: str) -> Path:
    path = ROOT / name
    return path / "README.md" if path.is_dir() else path


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, with links as the site has them."""
    from mkdocs.structure.files import File

    for name, place in OUTSIDE.items():
        source = _source(name)
        text = _relinked(source.read_text(), source.parent, place)
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to the pages that were added."""
    place = page.file.src_uri
    if place in OUTSIDE.values():
        return markdown
    return _relinked(markdown, ROOT / "docs" / Path(place).parent, place)


def _relinked(text: str, folder: Path, place: str) -> str:
    docs = ROOT / "docs"
    up = "../" * place.count("/")

    def moved(found: re.Match[str]) -> str:
        mark, label, name, anchor = found[1], found[2], found[3], found[4] or ""
        if not name or "://" in name:
            return found[0]
        target = (folder / name).resolve()
        for outside, its_place in OUTSIDE.items():
            if target in (ROOT / outside, _source(outside)):
                return f"{mark}[{label}]({up}{its_place}{anchor})"
        if target.is_relative_to(docs) and not target.is_dir():
            return f"{mark}[{label}]({up}{target.relative_to(docs)}{anchor})"
        # It is not on the site.
        return label

    return LINK.sub(moved, text)
