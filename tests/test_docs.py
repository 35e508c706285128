"""The docs say what the code does: every named test exists, every link leads somewhere, every example is true."""

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import chain, count
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    machines = {
        target.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        for target in n.targets
        if isinstance(target, ast.Name)
    }
    return names | machines


@cache
def anchors_of(page: Path) -> set[str]:
    """What a link may have after its `#`: the headings as GitHub names them, and explicit anchors."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-")
        found.add(next(each for each in chain([name], (f"{name}-{n}" for n in count(1))) if each not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path.resolve())):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_every_page_is_linked_from_the_entry_of_the_docs() -> None:
    entry = DOCS / "README.md"
    linked = {(entry.parent / target).resolve() for target, _ in LINK.findall(entry.read_text())}
    pages = [*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "tests" / "planted-bugs.md"]
    assert [page for page in pages if page != entry and page not in linked] == []


def test_the_project_s_readme_leads_to_the_entry_of_the_docs() -> None:
    text = (ROOT / "README.md").read_text()
    assert "](docs/README.md)" in text
    assert max(line.count("](docs/") for line in text.splitlines()) <= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text())
    assert [f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or name not in names_in(file)] == []


def test_every_guarantee_names_its_test() -> None:
    rows = [line for line in (DOCS / "guarantees.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| promise", "|--", "| ---"))]
    assert len(promises) > 20
    assert [row for row in promises if not NAMED_TEST.search(row)] == []


def test_forty_promises_in_plain_sentences_lead_to_the_tables_of_tests() -> None:
    lines = (DOCS / "guarantees.md").read_text().partition("## The tests")[0].splitlines()
    numbered = [line for line in lines if re.match(r"\d+\. ", line)]
    assert [int(line.partition(".")[0]) for line in numbered] == list(range(1, 41))
    assert [line for line in numbered if not line.endswith("))") or "](#" not in line] == []


def test_the_generated_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "tools/generate_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_architecture_page_names_every_module() -> None:
    """In the tables of its package, by its path in the package; and every path there is a file."""
    section = (DOCS / "architecture.md").read_text().partition("\n## Modules\n")[2].partition("\n## ")[0]
    named = {
        f"{package}/{path}"
        for package, table in re.findall(r"^### (\w+)(.*?)(?=^### |\Z)", section, re.DOTALL | re.MULTILINE)
        for path in re.findall(r"`([\w/]+\.py)`", table)
    }
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("journal", "tfmq", "pyspark_tfmq")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" or package == "pyspark_tfmq"
    }
    assert len(modules) > 200
    assert sorted(modules - named) == []
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_format_module_has_its_page() -> None:
    for format_name in ("record", "segment", "index", "mark", "state", "journal", "arrivals", "bucket"):
        assert (DOCS / "formats" / f"{format_name}.md").exists(), format_name


def test_every_decision_has_context_decision_and_consequences() -> None:
    for page in sorted((DOCS / "decisions").glob("*.md")):
        text = page.read_text().lower()
        assert all(word in text for word in ("context", "decision", "consequences")), page.name


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of the machine that it was made on."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    stray = re.compile(r"\.\./" + r"shared\b|/" + r"work/|/" + r"root/")
    found = []
    for name in filter(None, files):
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".cfg", ".sh", ".txt", ".service", ""):
            found += [f"{name}: {m[0]}" for m in stray.finditer(path.read_text(errors="ignore"))]
    assert found == []
