"""`@pytest.mark.tfmq_faults`: run a test once unchanged, then once for each possible fault.

Every run has its own fixtures, except those of wider scope. To pytest it is one test, which passes if every
run passes. The report of a failure is that of the first failed run, with its fault and the list of other
failed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import pytest

from tfmq.broker.request_handler import Engine
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_CODE, BY_REQUEST, JoinGroup, LeaveGroup
from tfmq.testing.simulation import World

MARKER: Final = "tfmq_faults"
FIXTURE: Final = "tfmq_broker"
RUNS: Final = 200
"""Maximum number of faults for each test, unless its marker sets another: takes some seconds."""
SHOWN_MAX: Final = 20
"""Maximum number of faults that are listed with a failure."""


class Arguments(NamedTuple):
    """The arguments of the marker."""

    kinds: tuple[str, ...]
    runs: int


def arguments(item: Any) -> Arguments:
    """Return the marker's arguments. Raises `BadRequest`."""

    def read(faults: Sequence[str] = KINDS, runs: int = RUNS) -> Arguments:
        return Arguments((faults,) if isinstance(faults, str) else tuple(faults), runs)

    mark = item.get_closest_marker(MARKER)
    try:
        found = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise BadRequest(f"@pytest.mark.{MARKER} takes faults= (of {', '.join(KINDS)}) and runs=.") from error
    if strange := [kind for kind in found.kinds if kind not in KINDS]:
        raise BadRequest(f"{strange[0]!r} is no fault kind of @pytest.mark.{MARKER}: {', '.join(KINDS)}.")
    if found.runs < 1:
        raise BadRequest(f"runs={found.runs} tries nothing; it takes a number from 1 on.")
    if FIXTURE not in item.fixturenames:
        raise BadRequest(f"A test with @pytest.mark.{MARKER} takes the fixture {FIXTURE}.")
    return found


def check_marker(item: Any) -> None:
    """Fail the set-up of a test whose marker is invalid."""
    try:
        arguments(item)
    except BadRequest as error:
        pytest.fail(str(error), pytrace=False)
    check_rerun(item)


def chosen(accidents: Sequence[Accident], count: int) -> list[Accident]:
    """Return all faults, or `count` of them, evenly spread."""
    if len(accidents) <= count:
        return list(accidents)
    return [accidents[index * len(accidents) // count] for index in range(count)]


class Rerun:
    """All runs of one test. `stash_key`: where the test's broker finds the fault run."""

    def __init__(self, item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> None:
        self._item = item
        self._nextitem = nextitem
        self._key = stash_key
        self._asked = arguments(item)
        self._broke: list[tuple[Accident, Any]] = []
        self._skipped = 0

    def reports(self) -> list[Any]:
        """Run the test as often as necessary; return the reports for pytest."""
        trial = Trial()
        with self._run(trial) as plain:
            possible = trial.accidents(self._asked.kinds) if plain.passed else []
            plan = chosen(possible, self._asked.runs)
            plain.tear_down(self._item.parent if plan else self._nextitem)
        if (
            plan and not plain.passed
        ):  # Failed by its teardown: one more run, which is not reported, has the last teardown.
            plan = plan[:1]
        for accident in plan:
            self._try(accident, last=accident is plan[-1])
        if not plain.passed:
            return plain.all()
        self._warn(len(possible), len(plan))
        return [plain.setup, self._verdict(plain.call, len(plan)), plain.teardown]

    @contextmanager
    def _run(self, trial: Trial) -> Iterator[Run]:
        item = self._item
        item.stash[self._key] = trial
        try:
            with fresh(item):
                yield Run(item)
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
        report.when = "call"  # pytest counts only a failed call as a failed test
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
    """Return the note that is added to an exception of this run."""
    if trial.accident is None:
        return ""
    if not trial.happened:
        return f"{MARKER}: this run was to be the one where {trial.accident}; the test did not come so far."
    return f"{MARKER}: without a fault the test passes; here {trial.accident}."


def run_protocol(item: Any, nextitem: Any, stash_key: pytest.StashKey[Any]) -> bool | None:
    """Run one marked test.

    Returns None if the marker is invalid or this pytest is unsupported: the set-up reports it.
    """
    if lacking(item):
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


try:
    from _pytest.runner import call_and_report as _call_and_report
except ImportError:  # pragma: no cover - reported by `check_rerun`
    _call_and_report = None  # type: ignore[assignment]

NEEDED: Final = ("_initrequest", "_request", "_report_sections", "funcargs")
"""Attributes of a test function: its fixture request, which is created for each run, and the captured output.

pytest has no public way to run a test twice. These attributes are what pytest-rerunfailures and others use
too; tried with pytest 8.0, 8.4, 9.0 and 9.2. A pytest without them is reported by `check_rerun`."""
STRICT: Final = "[XPASS(strict)]"


def lacking(item: Any) -> list[str]:
    """Return the names of required attributes that this version of pytest lacks."""
    missing: list[str] = [] if _call_and_report is not None else ["_pytest.runner.call_and_report"]
    return missing + [f"Function.{name}" for name in NEEDED if not hasattr(item, name)]


def check_rerun(item: Any) -> None:
    """Fail the test if it cannot be run again with this pytest."""
    if missing := lacking(item):
        pytest.fail(
            f"This pytest ({pytest.__version__}) cannot run {item.name} again: it has no {', '.join(missing)}."
            " @pytest.mark.tfmq_faults is for tests that are functions or methods, with pytest 8 or 9.",
            pytrace=False,
        )


@contextmanager
def fresh(item: Any) -> Iterator[None]:
    """Context in which `item` can be run as if it had never been run."""
    item._report_sections.clear()
    if not item._request:
        item._initrequest()
    try:
        yield
    finally:
        item._request = False
        item.funcargs = None


class Run:
    """pytest's reports of one run of `item`.

    Set-up and call run in the constructor, `tear_down` ends the run.
    """

    def __init__(self, item: Any) -> None:
        self._item = item
        self.setup: Any = _call_and_report(item, "setup", log=False)
        self.call: Any = _call_and_report(item, "call", log=False) if self.setup.passed else None
        self.teardown: Any = None

    def tear_down(self, nextitem: Any) -> None:
        """Tear down, except the fixtures that `nextitem` needs too."""
        self.teardown = _call_and_report(self._item, "teardown", log=False, nextitem=nextitem)

    def all(self) -> list[Any]:
        """Return the reports, in order."""
        return [report for report in (self.setup, self.call, self.teardown) if report is not None]

    @property
    def passed(self) -> bool:
        """Whether the test itself passed, also if its xfail mark expects a failure."""
        return self.call is not None and all(each.passed or _is_strict(each) for each in self.all())

    def failure(self) -> Any | None:
        """Return the first report of a failure, expected or not."""
        found = (each for each in self.all() if each.failed or (each.skipped and hasattr(each, "wasxfail")))
        return next((each for each in found if not _is_strict(each)), None)


def _is_strict(report: Any) -> bool:
    """Return whether the test passed although its strict xfail mark expects a failure."""
    return report.failed and isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT)


STRANGER: Final = "another-member"
SESSION_MS: Final = 30_000


class StrangersReply:
    """Ignores the replies to the foreign member: its assignment shows in what the other members lose."""

    silent = True

    def ok(self, *fields: Any, body: Any = b"") -> None:
        """Called when it has joined, or left."""

    def error(self, error: BaseException) -> None:
        """Called when it may not join: then the other members have only left."""

    def body_done(self) -> None:
        """Does nothing: there is no body."""


class StrangersSession:
    """The connection of the foreign member. Hashed by identity."""

    identity = "another member, for a moment"
    operator = False
    number = 0

    def on_close(self, callback: Callable[[], None]) -> None:
        """Does nothing: this connection is never lost."""


def live_groups(engine: Engine, names: Iterable[str]) -> list[str]:
    """Return those of `names` that have members now."""
    found = [engine.house.groups.find(name) for name in names]
    return [group.name for group in found if group is not None and group.members]


def expel(engine: Engine, name: str, *, stranger: bool) -> None:
    """Remove all members of the group `name`, as if their sessions had expired.

    With `stranger`, a foreign member then gets all their partitions, and releases them in `remove_foreign_member`. The
    members notice it as with any broker, join again, and continue after the saved offsets.
    """
    group = engine.house.groups.find(name)
    members = [] if group is None else list(group.members.values())
    topics = sorted(
        {topic for member in members for topic in (member.wishes.topics if member.wishes else ())}
    )
    session, reply = StrangersSession(), StrangersReply()
    for member in members:
        engine.leave_group(LeaveGroup(name, member.id, member.joined), b"", reply, session)  # type: ignore[arg-type]
    if stranger and topics:
        request = JoinGroup(name, STRANGER, topics, SESSION_MS)
        engine.join_group(request, b"", reply, session)  # type: ignore[arg-type]
    engine.turn_ended()  # assigns all partitions to the foreign member before another member can request them


def dismiss(engine: Engine, name: str) -> None:
    """Let the foreign member leave; its partitions are released."""
    group = engine.house.groups.find(name)
    stranger = None if group is None else group.members.get(STRANGER)
    if stranger is not None:
        request = LeaveGroup(name, STRANGER, stranger.joined)
        engine.leave_group(request, b"", StrangersReply(), StrangersSession())  # type: ignore[arg-type]
        engine.turn_ended()


CRASH, LOST_REPLY, DUPLICATE, REBALANCE = KINDS = ("crash", "lost_reply", "duplicate", "rebalance")
RECOVERY_SECONDS: Final = 10.0
"""Maximum time that passes after a fault until all clients are connected again; a client may never reconnect."""
ARRANGING: Final = frozenset(
    each.request.shape
    for each in BY_CODE.values()
    if each.name.startswith(("LIST_", "DESCRIBE_"))
    or each.name.endswith(("_TOPIC", "_SCHEDULE", "_HISTOGRAM"))
    or each.name in ("STATUS", "PING", "RESUME_PARTITION", "TRUNCATE", "RESET_GROUP")
)
"""Requests of an administrator never fail: tests use them for preparation and for checks, and no client
repeats them."""


class Step(NamedTuple):
    """One request, or one client call after `request`.

    `members`: whether a group had members at that time.
    """

    request: int
    name: str
    members: bool
    call: int = 0


class Accident(NamedTuple):
    """One possible fault. `kind` is one of `KINDS`."""

    kind: str
    step: Step

    def __str__(self) -> str:
        step = self.step
        request = f"request {step.request} ({step.name})"
        return {
            CRASH: f"the broker crashed when {request} came",
            LOST_REPLY: f"the reply to {request} was lost, with the connection",
            DUPLICATE: f"what was handed out and not saved came again at call {step.call}, behind {request}",
            REBALANCE: f"another member took all partitions for a moment behind {request}",
        }[self.kind]


class LostReply:
    """Executes a request, but breaks the connection in place of the reply, and calls `then()` afterwards."""

    def __init__(self, reply: Any, session: Any, then: Callable[[], None]) -> None:
        self._then = then
        self._reply = reply
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._lose()

    def error(self, error: BaseException) -> None:
        self._lose()

    def _lose(self) -> None:
        self._reply.silent = True
        self._reply.ok()
        self._session.transport.cut_off("a test lost the reply")
        self._then()


class DeliveryNoted:
    """A reply to FETCH that records in the fault run whether messages were delivered."""

    def __init__(self, reply: Any, trial: Trial) -> None:
        self._reply = reply
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._trial.delivered = self._trial.delivered or len(body) > 0
        self._reply.ok(*fields, body=body)


class Trial:
    """One run of a program against a simulated broker, with one fault or none.

    Without one it records all possible faults.

    Steps are counted from 1: requests, in the order in which the broker executes them, and calls, by which
    the program calls its clients. The simulation is deterministic, so a step of the run without a fault is
    the same step in the others, as long as the program does the same. Attach it to one `SimulatedBroker`;
    `happened`: the fault was injected.
    """

    def __init__(self, accident: Accident | None = None) -> None:
        self.accident = accident
        self.happened = False
        self.delivered = False
        """Whether any consumer got messages."""
        self.requests: list[Step] = []
        self.calls: list[Step] = []
        """The calls before which members of groups had got messages."""
        self._count = 0
        self._groups: dict[str, None] = {}
        self._down = False
        self._world: World | None = None
        self._power_cut: Callable[[], None] | None = None

    def begins_at(self, world: World, power_cut: Callable[[], None]) -> None:
        """Attach it to a broker and its clients. `power_cut` crashes and restarts the broker."""
        self._world, self._power_cut = world, power_cut

    def accidents(self, kinds: Sequence[str]) -> list[Accident]:
        """Return the faults that are possible in a run like this one."""
        steps = {
            CRASH: self.requests,
            LOST_REPLY: self.requests,
            DUPLICATE: self.calls,
            REBALANCE: [step for step in self.requests if step.members],
        }
        return [Accident(kind, step) for kind in kinds for step in steps[kind]]

    # Interface for the broker and its clients

    def serve(self, engine: Any, request: Any, reply: Any, session: Any) -> Any | None:
        """Return the reply object for the request; None: the request is not executed."""
        if self._down:
            reply.body_done()
            return None
        if type(request) in ARRANGING:
            return reply
        if isinstance(request, commands.JoinGroup):
            self._groups[request.group] = None
        name = BY_REQUEST[type(request)].name
        number = len(self.requests) + 1
        self.requests.append(Step(number, name, bool(live_groups(engine, self._groups))))
        if self._is_due(number, (CRASH, LOST_REPLY, REBALANCE)):
            return self._befall(reply, session)
        return DeliveryNoted(reply, self) if isinstance(request, commands.Fetch) else reply

    def called(self) -> None:
        """Record that the program calls a client."""
        self._count += 1
        engine = None if self._world is None else self._world.server.engine
        if engine is None or not self.requests:
            return
        if self.delivered and live_groups(engine, self._groups):
            step = self.requests[-1]
            self.calls.append(Step(step.request, step.name, True, self._count))
        if self._is_due(self._count, (DUPLICATE,)):
            self.happened = True
            self._take_away(stranger=False)

    # Fault injection

    def _is_due(self, number: int, kinds: Sequence[str]) -> bool:
        accident = self.accident
        if self.happened or accident is None or accident.kind not in kinds:
            return False
        return number == (accident.step.call or accident.step.request)

    def _befall(self, reply: Any, session: Any) -> Any | None:
        assert self.accident is not None and self._world is not None
        self.happened = True
        if self.accident.kind == LOST_REPLY:
            return LostReply(reply, session, partial(self._world.beside, self._recover))
        if self.accident.kind == REBALANCE:
            self._world.beside(partial(self._take_away, stranger=True))
            return reply
        self._down = True
        self._world.beside(self._crash)
        reply.body_done()
        return None

    def _crash(self) -> None:
        assert self._world is not None and self._power_cut is not None
        self._down = False
        if self._world.server.running:
            self._power_cut()
        self._recover()

    def _take_away(self, *, stranger: bool) -> None:
        world = self._world
        engine = None if world is None else world.server.engine
        if world is None or engine is None:
            return
        groups = live_groups(engine, self._groups)
        for name in groups:
            expel(engine, name, stranger=stranger)
        world.settle()
        for name in groups:
            dismiss(engine, name)
        self._recover()

    def _recover(self) -> None:
        """Advance time until every client that has requests is connected, and they are answered."""
        world = self._world
        assert world is not None
        world.advance_to(world.clock.monotonic() + RECOVERY_SECONDS, world.connected)
        world.settle()
