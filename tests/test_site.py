"""The documentation as a site: each link leads somewhere, and each page is in its navigation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_is_built_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        built = site / ("index.html" if str(name) == "index" else f"{name}/index.html")
        assert built.exists(), name
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text, page
        assert "fonts.googleapis" not in text, page
        assert "```" not in text, f"{page}: a block that was not understood"


def test_the_api_page_has_the_public_calls(site: Path) -> None:
    text = (site / "api/index.html").read_text()
    for name in ("Store.get_into", "Store.put", "Chunks.tensor", "Config", "EvictionPolicy.evict"):
        assert f"{name}" in text, name


def test_what_lies_beside_the_documentation_is_linked(site: Path) -> None:
    assert "project/readme/" in (site / "index.html").read_text()
    assert "project/http_server/" in (site / "tutorials/server/index.html").read_text()
