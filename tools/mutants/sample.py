"""`python -m tools.mutants.sample`: plausible mistakes at random lines of the product, and how many the tests catch.

First the map of which test runs which line (with `coverage`; about twice the time of `make test`):

    TFMQ_MUTANTS_MAP=/tmp/map TFMQ_TEST_SCALE=0.03 python -m pytest -p tools.mutants.covering tests -n 2 --dist loadfile
    python -m tools.mutants.sample --map /tmp/map --seed 1 --lines 200 --results /tmp/results.jsonl

Each mistake is made in a copy of the checkout, and the tests that run its line are tried there, those of its own
package and the quick ones first, up to the first that fails. What the results file has is not tried again. Survivors
are looked at by hand: those that change nothing that can be observed are named in a file of `file:line reason`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from threading import local

import click

from tools.mutants.covering import CHOSEN, RAN, Map
from tools.mutants.mistakes import PACKAGES, Mistake, drawn
from tools.mutants.mutant import ROOT, copied

SECONDS_MAX = 150.0
"""Of tests for one mistake, by the seconds of the map."""
LIKELY_FILES = 4
LIKELY_SECONDS = 20.0
FEW = 20
HANGING_SECONDS = 45
LEFT_OUT = ("tests/test_mutants.py", "tests/test_style.py")
"""They read the code instead of running it: they fail for any change of a quoted line."""
CAUGHT, SURVIVED, EQUIVALENT = "caught", "survived", "equivalent"


class Trials:
    """Copies of the checkout, one for each thread, and the mistakes tried in them."""

    def __init__(self, known: Map, folder: Path, seconds: float) -> None:
        self._known = known
        self._folder = folder
        self._seconds = seconds
        self._threads = local()

    def tried(self, mistake: Mistake) -> dict[str, object]:
        """The row of one mistake."""
        begun = time.monotonic()
        copy = self._copy()
        tests, left_out = self.chosen(mistake)
        row = asdict(mistake) | {"tests": len(tests), "left_out": left_out, "by": "", "result": SURVIVED}
        if tests:
            path = copy / mistake.file
            source = path.read_bytes()
            try:
                path.write_bytes(mistake.applied(source))
                likely = self._likely(tests)
                row |= self._run(copy, likely)
                rest = tests[len(likely) :]
                while row["result"] == SURVIVED and rest:
                    row |= self._run(copy, rest)
                    path.write_bytes(source)
                    failed = str(row["by"])
                    if failed not in rest or not self._fails_anyway(copy, rest, failed):
                        break
                    rest.remove(failed)
                    row |= {"result": SURVIVED, "by": ""}
                    path.write_bytes(mistake.applied(source))
            finally:
                path.write_bytes(source)
        return row | {"seconds": round(time.monotonic() - begun, 1)}

    def chosen(self, mistake: Mistake) -> tuple[list[str], int]:
        """The tests to run, the likeliest and the quickest files first, and how many there is no time for."""
        found = self.covering(mistake)
        files: dict[str, list[str]] = {}
        for test in sorted(found, key=lambda test: self._known.seconds[test]):
            files.setdefault(test.partition("::")[0], []).append(test)
        package, name = Path(mistake.file).parent.name, Path(mistake.file).stem

        def rank(file: str) -> tuple[int, float]:
            own = 0 if Path(file).stem == f"test_{name}" else 1 if Path(file).parent.name == package else 2
            return own, sum(self._known.seconds[test] for test in files[file])

        cheap = sorted(found, key=lambda test: (rank(test.partition("::")[0])[0] > 0, self._known.seconds[test]))
        spent = accumulate(self._known.seconds[test] for test in cheap)
        kept = set(cheap[: max(1, sum(total <= self._seconds for total in spent))])
        chosen = [test for file in sorted(files, key=rank) for test in files[file] if test in kept]
        return chosen, len(found) - len(chosen)

    def _likely(self, tests: Sequence[str]) -> list[str]:
        """The first of them, from few files: most mistakes are caught there, and reading many files takes long."""
        files: set[str] = set()
        spent = 0.0
        for count, test in enumerate(tests):
            files.add(test.partition("::")[0])
            spent += self._known.seconds[test]
            if count and (len(files) > LIKELY_FILES or spent > LIKELY_SECONDS):
                return list(tests[:count])
        return list(tests)

    def _fails_anyway(self, copy: Path, tests: Sequence[str], failed: str) -> bool:
        """Some tests need others of their file before them, which were not chosen."""
        file = failed.partition("::")[0]
        return self._run(copy, [test for test in tests if test.partition("::")[0] == file])["by"] == failed

    def covering(self, mistake: Mistake) -> set[str]:
        """The tests that run the mistake's line; of a line that runs with the import, those that use its names."""
        tree = ast.parse((ROOT / mistake.file).read_text())
        inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and node.lineno <= mistake.line <= (node.end_lineno or 0)
        ]
        statement = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
        body = getattr(statement, "body", None)
        last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or 0
        around_it = [n for n in inside if n.lineno < mistake.line <= (n.end_lineno or 0)]
        if around_it:
            found = self._known.tests(mistake.file, range(statement.lineno, last + 1))
            if len(found) < FEW:
                # Behind an exception that is thrown into a generator `coverage` misses lines: those of the function.
                nearest = max(around_it, key=lambda n: n.lineno)
                lines = range(nearest.lineno + 1, (nearest.end_lineno or nearest.lineno) + 1)
                found |= self._known.tests(mistake.file, lines)
        else:
            found = self._using({n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}, mistake.file)
        return {test for test in found if not test.startswith(LEFT_OUT)}

    def _using(self, names: set[str], file: str) -> set[str]:
        found: set[str] = set()
        words = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                text = path.read_text()
                if path != ROOT / file and not re.search(rf"\b{Path(file).stem}\b", text):
                    continue
                lines = [number for number, line in enumerate(text.splitlines(), 1) if words.search(line)]
                found |= self._known.tests(path.relative_to(ROOT).as_posix(), lines)
        for test in self._known.seconds:
            if Path(test.partition("::")[0]).stem in (f"test_{Path(file).stem}", "test_docs"):
                found.add(test)
        return found

    def _copy(self) -> Path:
        if not hasattr(self._threads, "folder"):
            self._threads.folder = Path(tempfile.mkdtemp(dir=self._folder))
            copied(self._threads.folder)
            subprocess.run([sys.executable, "-m", "compileall", "-q", self._threads.folder], check=False)
        folder: Path = self._threads.folder
        return folder

    def _run(self, copy: Path, tests: Sequence[str]) -> dict[str, object]:
        """Pytest in the copy, in a session of its own, which ends with it whatever the tests started."""
        chosen, ran, output = copy / "chosen", copy / "ran", copy / "output"
        chosen.write_text("\n".join(tests))
        ran.write_text("")
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tools.mutants.covering", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "--timeout", str(HANGING_SECONDS), *files]
        environment = {k: v for k, v in os.environ.items() if k.startswith(("PATH", "LANG", "JAVA"))}
        environment |= {"PYTHONPATH": str(copy), "HOME": str(copy), "TFMQ_TEST_SCALE": "0.03"}
        environment |= {CHOSEN: str(chosen), RAN: str(ran), "PYTHONDONTWRITEBYTECODE": "1"}
        with output.open("w") as out:
            run = subprocess.Popen(
                command,
                cwd=copy,
                env=environment,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = run.wait(self._seconds * 4 + 60)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
                run.wait()
        outcomes = ran.read_text().splitlines()
        failed = [line.partition(" ")[2] for line in outcomes if line.startswith("failed ")]
        if failed:
            return {"result": CAUGHT, "by": failed[0], "ran": len(outcomes)}
        if code in (0, 5):
            return {"result": SURVIVED, "by": "", "ran": len(outcomes)}
        said = output.read_text().strip()[-300:]
        return {"result": CAUGHT, "by": f"exit code {code}: {said}", "ran": len(outcomes)}


def failing_anyway(tests: Sequence[str], folder: Path) -> list[str]:
    """Which of the tests that caught something fail without any mistake: they caught nothing."""
    copied(folder)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder),
        "HOME": str(folder),
        "TFMQ_TEST_SCALE": "0.03",
    }
    chosen, ran = folder / "chosen", folder / "ran"
    chosen.write_text("\n".join(tests))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.mutants.covering", "-p", "no:cacheprovider", *files]
    subprocess.run(command, cwd=folder, env=environment | {CHOSEN: str(chosen), RAN: str(ran)}, check=False)
    return [line.removeprefix("failed ") for line in ran.read_text().splitlines() if line.startswith("failed ")]


def summary(rows: Sequence[dict[str, object]], reasons: dict[str, str]) -> str:
    """How many were drawn, equivalent, caught and survived, by package and together."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        place = f"{row['file']}:{row['line']}"
        result = EQUIVALENT if row["result"] == SURVIVED and place in reasons else str(row["result"])
        parts = str(row["file"]).split("/")
        for key in ("/".join(parts[: 2 if len(parts) > 2 and parts[0] == "tfmq" else 1]), "together"):
            counts.setdefault(key, Counter())[result] += 1
    lines = [f"{'package':20}{'drawn':>8}{'equivalent':>12}{'caught':>8}{'survived':>10}{'of those that count':>21}"]
    for key in sorted(counts, key=lambda key: (key == "together", key)):
        count = counts[key]
        counting = count[CAUGHT] + count[SURVIVED]
        share = f"{100 * count[CAUGHT] / counting:.0f} %" if counting else "-"
        lines.append(f"{key:20}{count.total():8}{count[EQUIVALENT]:12}{count[CAUGHT]:8}{count[SURVIVED]:10}{share:>21}")
    return "\n".join(lines)


@click.command(epilog="Example: python -m tools.mutants.sample --map /tmp/map --seed 1 --lines 200 --results r.jsonl")
@click.option("--map", "map_folder", type=click.Path(path_type=Path), help="What covering.py wrote.")
@click.option("--seed", default=1, show_default=True)
@click.option("--lines", default=200, show_default=True, help="How many are drawn.")
@click.option("--results", type=click.Path(path_type=Path), required=True, help="JSON lines; continued if there.")
@click.option("--equivalent", type=click.Path(exists=True, path_type=Path), help="Lines `file:line reason`.")
@click.option("--jobs", default=1, show_default=True)
@click.option("--seconds", default=SECONDS_MAX, show_default=True, help="Of tests for one mistake.")
@click.option("--only", default="", help="Only the drawn lines with this in `file:line`.")
@click.option("--again", is_flag=True, help="Try those again that survived.")
def main(
    map_folder: Path | None,
    seed: int,
    lines: int,
    results: Path,
    equivalent: Path | None,
    jobs: int,
    seconds: float,
    only: str,
    again: bool,
) -> None:
    """Draw, try, count. Without --map: count what the results have."""
    rows = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        rows[f"{row['file']}:{row['line']}"] = row
    if map_folder is not None:
        done = {place for place, row in rows.items() if not (again and row["result"] == SURVIVED)}
        todo = [
            mistake
            for mistake in drawn(ROOT, seed, lines)
            if f"{mistake.file}:{mistake.line}" not in done and only in f"{mistake.file}:{mistake.line}"
        ]
        folder = Path(tempfile.mkdtemp(prefix="tfmq-sample-"))
        trials = Trials(Map(map_folder), folder, seconds)
        try:
            with ThreadPoolExecutor(jobs) as workers, results.open("a") as file:
                for row in workers.map(trials.tried, todo):
                    rows[f"{row['file']}:{row['line']}"] = row
                    print(json.dumps(row), file=file, flush=True)
                    print(f"{row['file']}:{row['line']} {row['kind']}: {row['result']} {row['by']}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    reasons = {}
    for line in equivalent.read_text().splitlines() if equivalent else []:
        place, _, reason = line.partition(" ")
        reasons[place] = reason
    print(summary(list(rows.values()), reasons))


if __name__ == "__main__":
    main()
