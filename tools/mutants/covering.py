"""A plug-in for pytest: which tests run which lines of the product, and a run of chosen tests only.

`TFMQ_MUTANTS_MAP=FOLDER pytest -p tools.mutants.covering` writes the map with `coverage`, which must be installed;
`TFMQ_MUTANTS_CHOSEN=FILE` runs the tests that the file names, one a line, in its order of files.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest

MAP, CHOSEN, RAN = "TFMQ_MUTANTS_MAP", "TFMQ_MUTANTS_CHOSEN", "TFMQ_MUTANTS_RAN"
SAVE_SECONDS = 120.0
CONFIGURATION = """[run]
source_pkgs =
    journal
    tfmq
    pyspark_tfmq
parallel = true
data_file = {folder}/lines
context = {context}
sigterm = true
disable_warnings = no-data-collected,module-not-measured,module-not-imported
"""


class Recorder:
    """Notes lines and seconds of each test, in this process and, by the static context, in its children."""

    def __init__(self, folder: Path) -> None:
        import coverage

        folder.mkdir(parents=True, exist_ok=True)
        children = folder / "children.cfg"
        children.write_text(CONFIGURATION.format(folder=folder, context="${PYTEST_CURRENT_TEST-none}"))
        own = folder / f"own-{os.getpid()}.cfg"
        own.write_text(CONFIGURATION.format(folder=folder, context=""))
        os.environ["COVERAGE_PROCESS_START"] = str(children)
        self._coverage = coverage.Coverage(config_file=str(own), data_suffix=True)
        self._coverage.start()
        self._saved = time.monotonic()
        self._log = (folder / f"seconds-{os.getpid()}.jsonl").open("a")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        # A test that sets a trace function of its own, or none, ends the recording of those after it.
        self._coverage.stop()
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        begun = time.monotonic()
        yield
        self._coverage.switch_context("none")
        print(json.dumps([item.nodeid, time.monotonic() - begun]), file=self._log, flush=True)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._coverage.save()
            self._saved = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


class Chooser:
    """Runs the named tests only, and notes what failed and how many ran."""

    def __init__(self, chosen: Path, ran: Path) -> None:
        self._chosen = set(chosen.read_text().splitlines())
        files = [name.partition("::")[0] for name in chosen.read_text().splitlines()]
        self._order = {file: place for place, file in enumerate(dict.fromkeys(files))}
        self._ran = ran.open("w")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._chosen]
        # A file's own order stays: its tests may share a broker.
        items[:] = sorted(kept, key=lambda item: self._order[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "failed":
            print(report.outcome, report.nodeid, file=self._ran, flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            print("failed", report.nodeid, file=self._ran, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(CHOSEN):
        config.pluginmanager.register(Chooser(Path(os.environ[CHOSEN]), Path(os.environ[RAN])))
    worker = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if os.environ.get(MAP) and worker:
        config.pluginmanager.register(Recorder(Path(os.environ[MAP])))


class Map:
    """What was recorded: the tests of each line, and how long each test takes."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        for path in folder.glob("seconds-*.jsonl"):
            for line in path.read_text().splitlines():
                name, seconds = json.loads(line)
                self.seconds[name] = seconds
        self._files_tests: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self._files_tests[test.partition("::")[0]].append(test)
        self._files = [sqlite3.connect(path, check_same_thread=False) for path in sorted(folder.glob("lines.*"))]
        self._known: dict[str, list[tuple[str, bytes]]] = {}
        self._mutex = threading.Lock()

    def tests(self, file: str, lines: Iterable[int]) -> set[str]:
        """Those that run any of the lines."""
        wanted = list(lines)
        with self._mutex:
            if file not in self._known:
                self._known[file] = list(self._read(file))
            known = self._known[file]
        return {
            test
            for test, bits in known
            if any(line >> 3 < len(bits) and bits[line >> 3] >> (line & 7) & 1 for line in wanted)
        }

    def _read(self, file: str) -> Iterator[tuple[str, bytes]]:
        """(test, the lines that it ran as `coverage` packs them: bit 0 of the first byte is line 0)."""
        for database in self._files:
            rows = database.execute(
                "select context, numbits from line_bits join file on file.id = file_id"
                " join context on context.id = context_id where path like ?",
                (f"%/{file}",),
            )
            for context, bits in rows:
                test = context.removesuffix(" (call)").removesuffix(" (setup)")
                # What a fixture started may serve all tests of the file.
                tests = self._files_tests[test.partition("::")[0]] if context.endswith(" (setup)") else [test]
                for each in tests:
                    if each in self.seconds:
                        yield each, bits
