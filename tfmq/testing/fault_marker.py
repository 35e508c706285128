"""`@pytest.mark.tfmq_faults`: a test is run once as it is, then once for each accident, at each step that it has.

Every run has fixtures of its own, all but those of wider scope. To pytest it is one test: it passes if every run does;
what it says of a failure is that of the first run that failed, with the accident that broke it, and which others did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pytest

from tfmq.errors import BadRequest
from tfmq.testing import reruns
from tfmq.testing.trial import KINDS, Accident, Trial

MARKER: Final = "tfmq_faults"
FIXTURE: Final = "tfmq_broker"
RUNS: Final = 200
"""At most so many accidents for each test, unless it asks for more: some seconds."""
SHOWN_MAX: Final = 20
"""So many accidents are listed with a failure."""


class Arguments(NamedTuple):
    """What the marker was given."""

    kinds: tuple[str, ...]
    runs: int


def arguments(item: Any) -> Arguments:
    """The marker's arguments. Raises `BadRequest`."""

    def read(faults: Sequence[str] = KINDS, runs: int = RUNS) -> Arguments:
        return Arguments((faults,) if isinstance(faults, str) else tuple(faults), runs)

    mark = item.get_closest_marker(MARKER)
    try:
        found = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise BadRequest(f"@pytest.mark.{MARKER} takes faults= (of {', '.join(KINDS)}) and runs=.") from error
    if strange := [kind for kind in found.kinds if kind not in KINDS]:
        raise BadRequest(f"{strange[0]!r} is no fault of @pytest.mark.{MARKER}: {', '.join(KINDS)}.")
    if found.runs < 1:
        raise BadRequest(f"runs={found.runs} tries nothing; it takes a number from 1 on.")
    if FIXTURE not in item.fixturenames:
        raise BadRequest(f"A test with @pytest.mark.{MARKER} takes the fixture {FIXTURE}.")
    return found


def check(item: Any) -> None:
    """Ends the set-up of a test whose marker is wrong."""
    try:
        arguments(item)
    except BadRequest as error:
        pytest.fail(str(error), pytrace=False)
    reruns.check(item)


def chosen(accidents: Sequence[Accident], count: int) -> list[Accident]:
    """All of them, or `count`, evenly spread."""
    if len(accidents) <= count:
        return list(accidents)
    return [accidents[index * len(accidents) // count] for index in range(count)]


class Rerun:
    """All runs of one test. `stash_key` is where its broker finds the trial."""

    def __init__(self, item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> None:
        self._item = item
        self._nextitem = nextitem
        self._key = stash_key
        self._asked = arguments(item)
        self._broke: list[tuple[Accident, Any]] = []
        self._skipped = 0

    def reports(self) -> list[Any]:
        """Runs the test as often as is needed; what pytest is to be told of it."""
        trial = Trial()
        with self._run(trial) as plain:
            possible = trial.accidents(self._asked.kinds) if plain.passed else []
            plan = chosen(possible, self._asked.runs)
            plain.tear_down(self._item.parent if plan else self._nextitem)
        if (
            plan and not plain.passed
        ):  # by its teardown: one more run has the last teardown, and is not looked at
            plan = plan[:1]
        for accident in plan:
            self._try(accident, last=accident is plan[-1])
        if not plain.passed:
            return plain.all()
        self._warn(len(possible), len(plan))
        return [plain.setup, self._verdict(plain.call, len(plan)), plain.teardown]

    @contextmanager
    def _run(self, trial: Trial) -> Iterator[reruns.Run]:
        item = self._item
        item.stash[self._key] = trial
        try:
            with reruns.fresh(item):
                yield reruns.Run(item)
        finally:
            del item.stash[self._key]

    def _try(self, accident: Accident, *, last: bool) -> None:
        trial = Trial(accident)
        with self._run(trial) as run:
            run.tear_down(self._nextitem if last else self._item.parent)
        self._skipped += not trial.happened
        if (report := run.failure()) is not None:
            self._broke.append((accident, report))

    def _verdict(self, passed: Any, tried: int) -> Any:
        if not self._broke:
            return passed
        report = self._broke[0][1]
        report.when = "call"  # to pytest the test failed, wherever in its run
        lines = [f"{accident}" for accident, _ in self._broke[:SHOWN_MAX]]
        if (more := len(self._broke) - len(lines)) > 0:
            lines.append(f"... and {more} more")
        head = (
            f"Without a fault the test passes. With one it failed in {len(self._broke)} of {tried} runs, when"
        )
        report.sections.append((MARKER, "\n  ".join([head, *lines])))
        return report

    def _warn(self, possible: int, tried: int) -> None:
        if possible == 0:
            self._tell("no fault was possible: the test asks nothing of its broker that they could befall.")
        elif possible > tried:
            self._tell(f"{tried} of {possible} faults were tried, evenly spread; runs={possible} tries all.")
        if self._skipped:
            self._tell(
                f"{self._skipped} of {tried} faults had no chance: the test did not do the same in every run."
            )

    def _tell(self, sentence: str) -> None:
        self._item.warn(pytest.PytestWarning(f"{MARKER}: {self._item.nodeid}: {sentence}"))


def told(trial: Trial) -> str:
    """What is noted at an exception that a run raised."""
    if trial.accident is None:
        return ""
    if not trial.happened:
        return f"{MARKER}: this run was to be the one where {trial.accident}; the test did not come so far."
    return f"{MARKER}: without a fault the test passes; here {trial.accident}."


def run_protocol(item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> bool | None:
    """The whole of one marked test; None where the marker is wrong, or pytest lacks something: its set-up says so."""
    if reruns.lacking(item):
        return None
    try:
        rerun = Rerun(item, nextitem, stash_key)
    except BadRequest:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in rerun.reports():
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
