"""Builds the docs site into build/site: `python -m tools.docs_site`.

The pages link to each other as they do in the checkout, also out of docs/. So the site has the folders of the checkout:
README.md is its first page, and the pages, images and files that pages link to are copied into one folder. Its
navigation has the sections and links of docs/README.md. The build is strict: a link that leads nowhere, or a page that
docs/README.md does not name, is an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
CONFIGURATION = ROOT / "build" / "mkdocs.yml"
LINK = re.compile(r"\[([^]]+)\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")
COPIED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "conf/*",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/**/*.png",
    "examples/*/*.md",
    "examples/*/*.py",
    "tests/planted-bugs.md",
)


def copied() -> list[Path]:
    """The files of the site, as paths in the checkout."""
    return sorted({path.relative_to(ROOT) for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()})


def navigation() -> list[dict[str, Any]]:
    """Return the navigation: the first link to each page in docs/README.md, by section, and the pages beside these."""
    sections: dict[str, list[dict[str, str]]] = {}
    found = {"README.md", "docs/README.md", "CHANGELOG.md"}
    section = ""
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if line.startswith("##"):
            section = line.strip("# ")
        elif line.startswith("|"):
            for title, target in LINK.findall(line):
                page = os.path.relpath(ROOT / "docs" / target, ROOT)
                if page not in found:
                    found.add(page)
                    sections.setdefault(section, []).append({title.replace("`", ""): page})
    first: list[dict[str, Any]] = [{"tfmq": "README.md"}, {"All pages by task": "docs/README.md"}]
    return [*first, *({name: pages} for name, pages in sections.items()), {"Changes": "CHANGELOG.md"}]


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in copied():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, PAGES / path)
    CONFIGURATION.write_text(json.dumps({"INHERIT": "../mkdocs.yml", "nav": navigation()}))  # JSON is YAML
    # Not --quiet: mkdocs then does not count the warnings that a strict build fails for.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(CONFIGURATION)]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    if built.returncode:
        sys.stderr.buffer.write(built.stderr)
    else:
        print("wrote build/site/index.html")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
