"""`@pytest.mark.tfmq_faults`: run a test once unchanged, then once for each possible fault.

Every run has its own fixtures, except fixtures with a wider scope than a test. pytest sees all runs as one test, which
passes if every run passes. If runs fail, the report has the error of the first failed run, and the faults of all
failed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import pytest

from tfmq.broker.request_handler import RequestHandler
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import ACKS_SYNCED, BY_CODE, BY_REQUEST, JoinGroup, LeaveGroup
from tfmq.testing.planned_faults import ReplyProxy
from tfmq.testing.simulation import Simulation

MARKER: Final = "tfmq_faults"
FIXTURE: Final = "tfmq_broker"
DEFAULT_RUNS_MAX: Final = 200  # maximum runs with a fault, if the marker does not set `runs`
FAULTS_SHOWN_MAX: Final = 20  # maximum faults that the report of a failure lists


def marker_arguments(item: Any) -> tuple[tuple[str, ...], int]:
    """Return fault kinds and maximum runs of the test's marker. Raises `BadRequest` (bad marker, no `tfmq_broker`)."""

    def read(faults: Sequence[str] = KINDS, runs: int = DEFAULT_RUNS_MAX) -> tuple[tuple[str, ...], int]:
        return (faults,) if isinstance(faults, str) else tuple(faults), runs

    mark = item.get_closest_marker(MARKER)
    try:
        kinds, runs = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise BadRequest(f"@pytest.mark.{MARKER} takes faults= (of {', '.join(KINDS)}) and runs=.") from error
    if strange := [kind for kind in kinds if kind not in KINDS]:
        raise BadRequest(f"{strange[0]!r} is no fault kind of @pytest.mark.{MARKER}: {', '.join(KINDS)}.")
    if runs < 1:
        raise BadRequest(f"runs={runs} tries nothing; it takes a number from 1 on.")
    if FIXTURE not in item.fixturenames:
        raise BadRequest(f"A test with @pytest.mark.{MARKER} takes the fixture {FIXTURE}.")
    return kinds, runs


def check_marker(item: Any) -> None:
    try:
        marker_arguments(item)
    except BadRequest as error:
        pytest.fail(str(error), pytrace=False)
    check_rerun(item)


def sample_faults(faults: Sequence[InjectedFault], count: int) -> list[InjectedFault]:
    if len(faults) <= count:
        return list(faults)
    return [faults[index * len(faults) // count] for index in range(count)]


class RepeatedTest:
    """All runs of one marked test. `stash_key`: key in the test's stash at which `tfmq_broker` finds the fault run."""

    def __init__(self, item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> None:
        self._item = item
        self._nextitem = nextitem
        self._key = stash_key
        self._kinds, self._runs_max = marker_arguments(item)
        self._failed_faults: list[tuple[InjectedFault, Any]] = []
        self._not_injected = 0

    def reports(self) -> list[Any]:
        """Run the test without a fault, then once for each fault; return the reports for pytest."""
        fault_run = FaultRun()
        with self._run(fault_run) as plain:
            possible = fault_run.possible_faults(self._kinds) if plain.passed else []
            plan = sample_faults(possible, self._runs_max)
            plain.tear_down(self._item.parent if plan else self._nextitem)
        if (
            plan and not plain.passed
        ):  # The teardown failed. One more run, which is not reported, tears down the fixtures of wider scopes.
            plan = plan[:1]
        for fault in plan:
            self._run_with_fault(fault, last=fault is plan[-1])
        if not plain.passed:
            return plain.run_reports()
        self._warn_limits(len(possible), len(plan))
        return [plain.setup, self._final_report(plain.call, len(plan)), plain.teardown]

    @contextmanager
    def _run(self, fault_run: FaultRun) -> Iterator[PytestRun]:
        item = self._item
        item.stash[self._key] = fault_run
        try:
            with reset_item(item):
                yield PytestRun(item)
        finally:
            del item.stash[self._key]

    def _run_with_fault(self, fault: InjectedFault, *, last: bool) -> None:
        fault_run = FaultRun(fault)
        with self._run(fault_run) as run:
            run.tear_down(self._nextitem if last else self._item.parent)
        self._not_injected += not fault_run.happened
        if (report := run.failure()) is not None:
            self._failed_faults.append((fault, report))

    def _final_report(self, passed: Any, tried: int) -> Any:
        if not self._failed_faults:
            return passed
        report = self._failed_faults[0][1]
        report.when = "call"  # pytest counts only a failed call as a failed test
        lines = [f"{fault}" for fault, _ in self._failed_faults[:FAULTS_SHOWN_MAX]]
        if (more := len(self._failed_faults) - len(lines)) > 0:
            lines.append(f"... and {more} more")
        failed = len(self._failed_faults)
        head = f"Without a fault the test passes. With one it failed in {failed} of {tried} runs, when"
        report.sections.append((MARKER, "\n  ".join([head, *lines])))
        return report

    def _warn_limits(self, possible: int, tried: int) -> None:
        if possible == 0:
            self._log_warning("no fault was possible: the test asks nothing of its broker that they could befall.")
        elif possible > tried:
            self._log_warning(f"{tried} of {possible} faults were tried, evenly spread; runs={possible} tries all.")
        if self._not_injected:
            self._log_warning(
                f"{self._not_injected} of {tried} faults had no chance: the test did not do the same in every run."
            )

    def _log_warning(self, sentence: str) -> None:
        self._item.warn(pytest.PytestWarning(f"{MARKER}: {self._item.nodeid}: {sentence}"))


def fault_note(fault_run: FaultRun) -> str:
    """Return a note that names the injected fault, for exceptions in `fault_run`; "" if the run has no fault."""
    if fault_run.fault is None:
        return ""
    if not fault_run.happened:
        return f"{MARKER}: this run was to be the one where {fault_run.fault}; the test did not come so far."
    return f"{MARKER}: without a fault the test passes; here {fault_run.fault}."


def run_protocol(item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> bool | None:
    """Run a marked test without a fault and with each fault. Return None if the marker or this pytest is unsuitable.

    In that case the test is not run here: pytest runs it as usual, and its set-up fails with the reason.
    """
    if missing_attributes(item):
        return None
    try:
        rerun = RepeatedTest(item, nextitem, stash_key)
    except BadRequest:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in rerun.reports():
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


try:
    from _pytest.runner import call_and_report as _call_and_report
except ImportError:  # pragma: no cover - reported by `check_rerun`
    _call_and_report = None  # type: ignore[assignment]

REQUIRED_ATTRIBUTES: Final = ("_initrequest", "_request", "_report_sections", "funcargs")
"""Attributes of pytest's test functions that are used to run a test twice; pytest has no public function for that.

pytest-rerunfailures and other plug-ins use these attributes, too. The marker was tried with pytest 8.0, 8.4, 9.0 and
9.2. `check_rerun` fails the test if pytest lacks any of these attributes."""
STRICT: Final = "[XPASS(strict)]"


def missing_attributes(item: Any) -> list[str]:
    missing: list[str] = [] if _call_and_report is not None else ["_pytest.runner.call_and_report"]
    return missing + [f"Function.{name}" for name in REQUIRED_ATTRIBUTES if not hasattr(item, name)]


def check_rerun(item: Any) -> None:
    """Fail the test if it cannot be run again with this pytest."""
    if missing := missing_attributes(item):
        pytest.fail(
            f"This pytest ({pytest.__version__}) cannot run {item.name} again: it has no {', '.join(missing)}."
            " @pytest.mark.tfmq_faults is for tests that are functions or methods, with pytest 8 or 9.",
            pytrace=False,
        )


@contextmanager
def reset_item(item: Any) -> Iterator[None]:
    """Context in which pytest's test `item` can be run as if it had never been run before."""
    item._report_sections.clear()
    if not item._request:
        item._initrequest()
    try:
        yield
    finally:
        item._request = False
        item.funcargs = None


class PytestRun:
    """One run of `item`, with pytest's reports. The constructor runs set-up and test, `tear_down` the teardown."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self.setup: Any = _call_and_report(item, "setup", log=False)
        self.call: Any = _call_and_report(item, "call", log=False) if self.setup.passed else None
        self.teardown: Any = None

    def tear_down(self, nextitem: Any) -> None:
        """Tear down all fixtures that the next test, `nextitem`, does not need."""
        self.teardown = _call_and_report(self._item, "teardown", log=False, nextitem=nextitem)

    def run_reports(self) -> list[Any]:
        return [report for report in (self.setup, self.call, self.teardown) if report is not None]

    @property
    def passed(self) -> bool:
        """Whether set-up, test and teardown passed. A test that passes although marked as xfail counts as passed."""
        return self.call is not None and all(each.passed or _is_strict(each) for each in self.run_reports())

    def failure(self) -> Any | None:
        """Return the first report of a failure, also of a failure that an xfail mark expects; None if there is none."""
        found = (each for each in self.run_reports() if each.failed or (each.skipped and hasattr(each, "wasxfail")))
        return next((each for each in found if not _is_strict(each)), None)


def _is_strict(report: Any) -> bool:
    """Return whether the test passed although its strict xfail mark expects a failure."""
    return report.failed and isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT)


FOREIGN_MEMBER: Final = "another-member"
SESSION_MS: Final = 30_000


class ForeignMember:
    """The member that the fault "rebalance" adds to a group, so that the real members lose their partitions.

    The broker gets an object of this class as session and as reply: there is no connection, and replies are ignored.
    """

    identity = "another member, for a moment"
    operator = False
    user = ""
    number = 0
    synced_durability = ACKS_SYNCED

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no request body to release, no connection to lose, and replies do not matter."""

    ok = error = body_done = on_close = ignore


def live_groups(engine: RequestHandler, names: Iterable[str]) -> list[str]:
    found = [engine.broker.group_coordinator.find(name) for name in names]
    return [group.name for group in found if group is not None and group.members]


def expire_members(engine: RequestHandler, name: str, *, foreign: bool) -> None:
    """Remove all members of a group, as if their sessions had expired. The members notice the removal and join again.

    `foreign`: a foreign member gets all partitions before the members join again. `remove_foreign_member` removes it.
    """
    group = engine.broker.group_coordinator.find(name)
    members = [] if group is None else list(group.members.values())
    topics = sorted(
        {topic for member in members for topic in (member.subscription.topics if member.subscription else ())}
    )
    session: Any = ForeignMember()
    for member in members:
        engine.handle(LeaveGroup(name, member.id, member.joined), b"", session, session)
    if foreign and topics:
        request = JoinGroup(name, FOREIGN_MEMBER, topics, SESSION_MS)
        engine.handle(request, b"", session, session)
    engine.broker.end_turn()  # assigns all partitions to the foreign member before another member can request them


def remove_foreign_member(engine: RequestHandler, name: str) -> None:
    group = engine.broker.group_coordinator.find(name)
    member = None if group is None else group.members.get(FOREIGN_MEMBER)
    if member is not None:
        session: Any = ForeignMember()
        engine.handle(LeaveGroup(name, FOREIGN_MEMBER, member.joined), b"", session, session)
        engine.broker.end_turn()


CRASH, LOST_REPLY, DUPLICATE, REBALANCE = KINDS = ("crash", "lost_reply", "duplicate", "rebalance")
RECOVERY_SECONDS: Final = 10.0
"""Longest time that a run waits after a fault until all clients are connected again; some may never reconnect."""
EXEMPT_COMMANDS: Final = frozenset(
    each.request.shape
    for each in BY_CODE.values()
    if each.name.startswith(("LIST_", "DESCRIBE_"))
    or each.name.endswith(("_TOPIC", "_SCHEDULE", "_HISTOGRAM"))
    or each.name in ("STATUS", "PING", "RESUME_PARTITION", "TRUNCATE", "RESET_GROUP")
)
"""Administration requests, which get no fault: tests use them to prepare and check, and clients do not repeat them."""


class Step(NamedTuple):
    """A point of a run at which a fault is possible: the request number `request`, or a client call after it."""

    request: int
    name: str
    has_members: bool  # whether any group had members at this step
    call: int = 0  # number of the client call; 0 if the step is a request


class InjectedFault(NamedTuple):
    kind: str
    step: Step

    def __str__(self) -> str:
        step = self.step
        request = f"request {step.request} ({step.name})"
        return {
            CRASH: f"the broker crashed when {request} came",
            LOST_REPLY: f"the reply to {request} was lost, with the connection",
            DUPLICATE: f"what was handed out and not saved came again at call {step.call}, after {request}",
            REBALANCE: f"another member took all partitions for a moment after {request}",
        }[self.kind]


class LostReply(ReplyProxy):
    """Reply object that breaks the connection instead of sending the reply, and then calls `then()`."""

    def __init__(self, reply: Any, session: Any, then: Callable[[], None]) -> None:
        super().__init__(reply)
        self._then = then
        self._session = session

    def ok(self, *_: Any, **__: Any) -> None:
        self._reply.is_silent = True
        self._reply.ok()
        self._session.transport.cut_off("a test lost the reply")
        self._then()

    error = ok


class FetchReplyObserver(ReplyProxy):
    """Reply object that sends the reply to a FETCH, and records in `fault_run` whether the reply had messages."""

    def __init__(self, reply: Any, fault_run: FaultRun) -> None:
        super().__init__(reply)
        self._fault_run = fault_run

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._fault_run.has_delivered = self._fault_run.has_delivered or len(body) > 0
        self._reply.ok(*fields, body=body)


class FaultRun:
    """One run of a test against a simulated broker, with one fault or none.

    A run without a fault records the steps at which faults are possible: requests that the broker executes, and calls
    of clients by the test. Requests and calls are counted from 1. The simulation is deterministic, so a step has the
    same number in later runs, as long as the test does the same; a run with a fault injects the fault at its step.
    """

    def __init__(self, fault: InjectedFault | None = None) -> None:
        self.fault = fault
        self.happened = False
        self.has_delivered = False  # whether any consumer has received messages so far
        self.requests: list[Step] = []
        self.calls: list[Step] = []
        """The client calls that were made after a consumer had received messages and while a group had members."""
        self._count = 0
        self._groups: dict[str, None] = {}
        self._is_down = False
        self._simulation: Simulation | None = None
        self._crash_broker: Callable[[], None] | None = None

    def attach(self, simulation: Simulation, crash: Callable[[], None]) -> None:
        """Set the broker and clients of this run. `crash` is called to let the broker crash and start again."""
        self._simulation, self._crash_broker = simulation, crash

    def possible_faults(self, kinds: Sequence[str]) -> list[InjectedFault]:
        steps = {
            CRASH: self.requests,
            LOST_REPLY: self.requests,
            DUPLICATE: self.calls,
            REBALANCE: [step for step in self.requests if step.has_members],
        }
        return [InjectedFault(kind, step) for kind in kinds for step in steps[kind]]

    # Methods that the broker and its clients call

    def serve(self, engine: Any, request: Any, reply: Any, session: Any) -> Any | None:
        """Record a request; inject a due fault. Return the reply object; None if the request must not be executed."""
        if self._is_down:
            reply.body_done()
            return None
        if type(request) in EXEMPT_COMMANDS:
            return reply
        if isinstance(request, commands.JoinGroup):
            self._groups[request.group] = None
        name = BY_REQUEST[type(request)].name
        number = len(self.requests) + 1
        self.requests.append(Step(number, name, bool(live_groups(engine, self._groups))))
        if self._is_due(number, (CRASH, LOST_REPLY, REBALANCE)):
            return self._inject(reply, session)
        return FetchReplyObserver(reply, self) if isinstance(request, commands.Fetch) else reply

    def client_called(self) -> None:
        self._count += 1
        engine = None if self._simulation is None else self._simulation.server.engine
        if engine is None or not self.requests:
            return
        if self.has_delivered and live_groups(engine, self._groups):
            step = self.requests[-1]
            self.calls.append(Step(step.request, step.name, True, self._count))
        if self._is_due(self._count, (DUPLICATE,)):
            self.happened = True
            self._expire_groups(foreign=False)

    def _is_due(self, number: int, kinds: Sequence[str]) -> bool:
        fault = self.fault
        if self.happened or fault is None or fault.kind not in kinds:
            return False
        return number == (fault.step.call or fault.step.request)

    def _inject(self, reply: Any, session: Any) -> Any | None:
        assert self.fault is not None and self._simulation is not None
        self.happened = True
        if self.fault.kind == LOST_REPLY:
            return LostReply(reply, session, partial(self._simulation.call_soon, self._recover))
        if self.fault.kind == REBALANCE:
            self._simulation.call_soon(partial(self._expire_groups, foreign=True))
            return reply
        self._is_down = True
        self._simulation.call_soon(self._crash)
        reply.body_done()
        return None

    def _crash(self) -> None:
        assert self._simulation is not None and self._crash_broker is not None
        self._is_down = False
        if self._simulation.server.running:
            self._crash_broker()
        self._recover()

    def _expire_groups(self, *, foreign: bool) -> None:
        simulation = self._simulation
        engine = None if simulation is None else simulation.server.engine
        if simulation is None or engine is None:
            return
        groups = live_groups(engine, self._groups)
        for name in groups:
            expire_members(engine, name, foreign=foreign)
        simulation.settle()
        for name in groups:
            remove_foreign_member(engine, name)
        self._recover()

    def _recover(self) -> None:
        simulation = self._simulation
        assert simulation is not None
        simulation.advance_to(simulation.clock.monotonic() + RECOVERY_SECONDS, simulation.all_connected)
        simulation.settle()
