"""What a user's type checker says of programs that use tfmq: mypy --strict and pyright, over examples/ and over the
programs of the tutorials. `python -m tools.check_types [NAME]...`: only those whose name has one of these words in it.

Both run with their own settings, not with ours, as in a user's checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PROGRAM = re.compile(r"^```python\n# (?:at the end of )?(\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESTS = re.compile(r"test_\w+\.py|conftest\.py")
CACHE: Final = ROOT / ".mypy_cache" / "users"
CHECKERS: Final = (
    ("mypy", "--strict", "--config-file=mypy.ini", "--explicit-package-bases", f"--cache-dir={CACHE}"),
    ("pyright", "--pythonpath", sys.executable),  # else it takes the first python of $PATH
)
DJANGO: Final = {
    "mypy.ini": "[mypy]\nplugins = mypy_django_plugin.main\n[mypy.plugins.django-stubs]\n"
    "django_settings_module = shop.settings\n",
    "shop/settings.py": 'SECRET_KEY = "none"\nINSTALLED_APPS = ["shop"]\n',
    "shop/__init__.py": "",
}
"""What Django's users give their type checkers, and what `django-admin startproject` makes."""


class Programs(NamedTuple):
    """Files that are checked together, from within `folder`."""

    name: str
    folder: Path
    files: tuple[str, ...]


def examples() -> Programs:
    """All that is in examples/, without tests."""
    found = sorted(path for path in (ROOT / "examples").rglob("*.py") if not TESTS.fullmatch(path.name))
    return Programs("examples", ROOT, tuple(str(path.relative_to(ROOT)) for path in found))


def tutorials(scratch: Path) -> Iterator[Programs]:
    """The programs of each page, written into a folder of their own."""
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md")):
        files = [
            (name, text)
            for name, text in PROGRAM.findall(page.read_text())
            if not TESTS.fullmatch(name) and "settings" not in name and "wsgi" not in name
        ]
        for name, text in files:
            path = scratch / page.stem / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if any("django" in text for _, text in files):
            for name, text in DJANGO.items():
                (scratch / page.stem / name).write_text(text)
        if files:
            yield Programs(page.stem, scratch / page.stem, tuple(name for name, _ in files))


def said(checker: str, options: Sequence[str], programs: Programs) -> str:
    """What the checker has against them; nothing, if all is well."""
    if not (programs.folder / "mypy.ini").exists():
        options = ["--config-file=" if option.startswith("--config") else option for option in options]
    done = subprocess.run(
        [sys.executable, "-m", checker, *options, *programs.files],
        cwd=programs.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"{checker} of {programs.name}:\n{done.stdout}{done.stderr}"
    print(f"{checker} of {programs.name}: {len(programs.files)} files, no complaints", flush=True)
    return ""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 if nobody complains. One checker runs beside the other."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(CHECKERS)) as pool:
        chosen = [
            programs
            for programs in [examples(), *tutorials(Path(scratch))]
            if not arguments or any(word in programs.name for word in arguments)
        ]

        def said_of_all(checker: tuple[str, ...]) -> list[str]:
            return [said(checker[0], checker[1:], programs) for programs in chosen]

        complaints = [text for each in pool.map(said_of_all, CHECKERS) for text in each if text]
        for complaint in complaints:
            print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
