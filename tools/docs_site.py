"""Builds the docs site into build/site: `python -m tools.docs_site`.

The pages link to each other as they do in the checkout, also out of docs/. So the site has the folders of the checkout:
README.md is its first page, and the pages, images and files that pages link to are copied into one folder. The build
is strict: a link that leads nowhere, or a page that `nav` in mkdocs.yml does not name, is an error.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
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


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in copied():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, PAGES / path)
    # Not --quiet: mkdocs then does not count the warnings that a strict build fails for.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    if built.returncode:
        sys.stderr.buffer.write(built.stderr)
    else:
        print("wrote build/site/index.html")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
