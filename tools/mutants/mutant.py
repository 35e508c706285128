"""What a planted bug is, and how one is tried: in a copy of the checkout, never in the checkout itself."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

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
    if path.suffix != ".py":
        return changed
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
    """Copy what the tests need into `folder`."""
    for item in COPIED:
        source = ROOT / item
        if source.is_dir():
            shutil.copytree(source, folder / item, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / item)


class CheckoutCopy:
    """A copy of the checkout in which bugs are planted one after another.

    Making a copy and compiling its modules takes longer than most bugs' tests, so a copy and its bytecode are used
    again. Not thread-safe: each worker has its own.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._home, self._bytecode = folder / "tree", folder / "home", folder / "bytecode"
        self.tree.mkdir()
        copied(self.tree)
        self._next_mtime = int(time.time()) + 1

    def plant(self, mutant: Mutant) -> None:
        """Write the file with the bug. Raises `DoesNotFit`."""
        path = self.tree / mutant.file
        path.write_text(with_bug(mutant, self.tree))
        # Bytecode is valid for one time of change and size; two bugs of a file may be planted in the same second.
        os.utime(path, (self._next_mtime, self._next_mtime))
        self._next_mtime += 1

    def restore(self, mutant: Mutant) -> None:
        """Write the original file again."""
        shutil.copy2(ROOT / mutant.file, self.tree / mutant.file)

    def run_tests(
        self, tests: Sequence[str], scale: float, *options: str, seconds: float = TRY_SECONDS
    ) -> tuple[int, str]:
        """Return pytest's exit code and output. A run that takes longer than `seconds` counts as a failed test."""
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--timeout", str(TEST_SECONDS)]
        command += ["-p", "no:cacheprovider", *options, *tests]
        for leftover in (self._home, self.tree / ".hypothesis"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._home.mkdir()
        environment = {"PYTHONPATH": str(self.tree), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        environment |= {"HOME": str(self._home), "PYTHONPYCACHEPREFIX": str(self._bytecode)}
        environment |= {"TFMQ_TEST_SCALE": str(scale)}
        try:
            run = subprocess.run(
                command, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return 1, f"FAILED {tests[0]} hung"
        return run.returncode, run.stdout + run.stderr


@contextmanager
def copy_of_checkout() -> Iterator[CheckoutCopy]:
    """Make a copy of the checkout; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tfmq-mutant-") as name:
        yield CheckoutCopy(Path(name))


def failing_without(mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """Return the tests that fail without any bug: they would prove nothing."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with copy_of_checkout() as copy:
        limit = TRY_SECONDS * 10 + len(tests) * 10
        code, output = copy.run_tests(tests, mutants[0].scale, "-n", str(jobs), seconds=limit)
    return FAILED.findall(output) + ERRORED.findall(output) or [output.strip()[-300:]] * bool(code)


def tried(mutant: Mutant, copy: CheckoutCopy, likely: str | None = None) -> Verdict:
    """Plant the bug in the copy and run its tests, after the test `likely` only if that one does not fail."""
    verdict, begun = Verdict(mutant), time.monotonic()
    try:
        copy.plant(mutant)
    except DoesNotFit as error:
        verdict.trouble = str(error)
    else:
        code, output = 0, ""
        for tests in ([likely], mutant.tests) if likely else (mutant.tests,):
            code, output = copy.run_tests(tests, mutant.scale, "-x")
            verdict.caught_by = FAILED.findall(output) + ERRORED.findall(output)
            if verdict.caught:
                break
        if code and not verdict.caught_by:
            verdict.trouble = f"its tests did not run: {output.strip()[-300:]}"
        copy.restore(mutant)
    verdict.seconds = time.monotonic() - begun
    return verdict


def tried_all(mutants: Sequence[Mutant], jobs: int = 1, likely: Mapping[str, str] | None = None) -> Iterator[Verdict]:
    """Try the bugs, `jobs` at a time; yields the verdicts in their order.

    `likely`: the test that caught a bug of this name the last time. It runs first, since most of a file's tests pass.
    """
    with ExitStack() as opened:
        copies: SimpleQueue[CheckoutCopy] = SimpleQueue()
        for _ in range(jobs):
            copies.put(opened.enter_context(copy_of_checkout()))

        def tried_in_next_copy(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return tried(mutant, copy, (likely or {}).get(mutant.name))
            finally:
                copies.put(copy)

        yield from opened.enter_context(ThreadPoolExecutor(jobs)).map(tried_in_next_copy, mutants)
