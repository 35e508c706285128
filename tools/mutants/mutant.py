"""What a planted bug is, and how one is tried: in a copy of the checkout, never in the checkout itself."""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "journal",
    "tfmq",
    "pyspark_tfmq",
    "tests",
    "tools",
    "conf",
    "docs",
    "examples",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
)
TRY_SECONDS = 240
TEST_SECONDS = 120
FAILED = re.compile(r"^FAILED (tests/\S+)", re.MULTILINE)
ERRORED = re.compile(r"^ERROR (tests/\S+::\S+)", re.MULTILINE)
"""In a fixture. A file that cannot be collected catches nothing: it would not be collected with any other bug. Tests
that a test runs, in a folder of its own, are not named here."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: in `file`, `old` (which must be there exactly once) becomes `new`; `tests` should fail then."""

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    scale: float = 0.03


@dataclass(slots=True)
class Verdict:
    """Whether the bug was caught, by which tests, and how long that took."""

    mutant: Mutant
    caught_by: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.caught_by)


class DoesNotFit(ValueError):
    """The code is not as it was when the bug was thought of: look where the promise is kept now."""


def with_bug(mutant: Mutant, folder: Path = ROOT) -> str:
    """The file's text with the bug in it. Raises `DoesNotFit`."""
    path = folder / mutant.file
    if not path.exists():
        raise DoesNotFit(f"{mutant.file} is not there any more")
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise DoesNotFit(f"{mutant.file} has what it replaces {text.count(mutant.old)} times, not once")
    changed = text.replace(mutant.old, mutant.new)
    if changed == text:
        raise DoesNotFit("it changes nothing")
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise DoesNotFit(f"{mutant.file} is no Python any more: {error}") from None
    return changed


def missing_tests(mutant: Mutant) -> list[str]:
    """Which of its tests are not there."""
    found = []
    for test in mutant.tests:
        file, _, name = test.partition("::")
        path = ROOT / file
        if not path.exists() or (name and name.partition("[")[0] not in path.read_text()):
            found.append(test)
    return found


def copied(folder: Path) -> None:
    """A copy of what the tests need."""
    for item in COPIED:
        source = ROOT / item
        if source.is_dir():
            shutil.copytree(source, folder / item, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / item)


def failing_without(mutants: Sequence[Mutant]) -> list[str]:
    """Which of the tests fail as the code is: they would prove nothing."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="tfmq-mutant-") as name:
        copied(Path(name))
        code, output = tested(Path(name), tests, mutants[0].scale, seconds=TRY_SECONDS * 10)
    return FAILED.findall(output) + ERRORED.findall(output) or [output.strip()[-300:]] * bool(code)


def tried(mutant: Mutant) -> Verdict:
    """Plant it in a new copy and run its tests."""
    verdict, begun = Verdict(mutant), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tfmq-mutant-") as name:
        folder = Path(name)
        copied(folder)
        try:
            (folder / mutant.file).write_text(with_bug(mutant, folder))
        except DoesNotFit as error:
            verdict.trouble = str(error)
        else:
            code, output = tested(folder, mutant.tests, mutant.scale, "-x")
            verdict.caught_by = FAILED.findall(output) + ERRORED.findall(output)
            if code and not verdict.caught_by:
                verdict.trouble = f"its tests did not run: {output.strip()[-300:]}"
    verdict.seconds = time.monotonic() - begun
    return verdict


def tested(
    folder: Path, tests: Sequence[str], scale: float, *options: str, seconds: float = TRY_SECONDS
) -> tuple[int, str]:
    """Pytest's exit code and what it said; a run that hangs counts as caught, by the clock."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--timeout", str(TEST_SECONDS)]
    command += ["-p", "no:cacheprovider", *options, *tests]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
    environment |= {"TFMQ_TEST_SCALE": str(scale), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {tests[0]} hung"
    return run.returncode, run.stdout + run.stderr
