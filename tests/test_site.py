"""The docs site: it has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools import docs_site

LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(https?:|//)|<link\b[^>]*\srel=["']?(?:stylesheet|preconnect|icon)[^>]*\shref=["']?(https?:|//)"""
)


def test_the_navigation_of_the_site_names_every_page_once() -> None:
    named: list[str] = []
    for entry in docs_site.navigation():
        for value in entry.values():
            named += [value] if isinstance(value, str) else [page for each in value for page in each.values()]
    assert sorted(named) == sorted(path.as_posix() for path in docs_site.copied() if path.suffix == ".md")


@pytest.mark.long
def test_the_site_is_built_strictly_and_loads_nothing_from_other_servers() -> None:
    assert docs_site.main() == 0, "a link leads nowhere"
    built = ROOT / "build" / "site"
    pages = {path: path.read_text() for path in built.rglob("*.html")}
    assert built / "docs" / "operations.html" in pages
    assert [path for path, text in pages.items() if LOADED.search(text)] == []
    assert "docs/operations.html" in Path(built, "search", "search_index.json").read_text()
