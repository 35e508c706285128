"""`@pytest.mark.tfmq_faults`: a test is run once as it is, then once for each accident, at each step that it has.

Every run has fixtures of its own, all but those of wider scope. To pytest it is one test: it passes if every run does;
what it says of a failure is that of the first run that failed, with the accident that broke it, and which others did.
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


def check_marker(item: Any) -> None:
    """Ends the set-up of a test whose marker is wrong."""
    try:
        arguments(item)
    except BadRequest as error:
        pytest.fail(str(error), pytrace=False)
    check_rerun(item)


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


# Running one test of pytest's again: the only place that touches what pytest keeps to itself.
#
# pytest has no public way to run a test twice. What is used here is what pytest-rerunfailures and others build on, too;
# tried with pytest 8.0, 8.4, 9.0 and 9.2. A pytest without it is told by name, see `check`.

try:
    from _pytest.runner import call_and_report as _call_and_report
except ImportError:  # pragma: no cover - said by `check`
    _call_and_report = None  # type: ignore[assignment]

NEEDED: Final = ("_initrequest", "_request", "_report_sections", "funcargs")
"""What a test function has: its request for fixtures, made anew for each run, and what the last run had printed."""
STRICT: Final = "[XPASS(strict)]"


def lacking(item: Any) -> list[str]:
    """What this version of pytest lacks of all this."""
    missing: list[str] = [] if _call_and_report is not None else ["_pytest.runner.call_and_report"]
    return missing + [f"Function.{name}" for name in NEEDED if not hasattr(item, name)]


def check_rerun(item: Any) -> None:
    """Fails the test if it cannot be run again with this pytest."""
    if missing := lacking(item):
        pytest.fail(
            f"This pytest ({pytest.__version__}) cannot run {item.name} again: it has no {', '.join(missing)}."
            " @pytest.mark.tfmq_faults is for tests that are functions or methods, with pytest 8 or 9.",
            pytrace=False,
        )


@contextmanager
def fresh(item: Any) -> Iterator[None]:
    """`item` may be run inside, as if it had never been."""
    item._report_sections.clear()
    if not item._request:
        item._initrequest()
    try:
        yield
    finally:
        item._request = False
        item.funcargs = None


class Run:
    """What pytest said of one run of `item`: its set-up and its call are made at once, `tear_down` ends it."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self.setup: Any = _call_and_report(item, "setup", log=False)
        self.call: Any = _call_and_report(item, "call", log=False) if self.setup.passed else None
        self.teardown: Any = None

    def tear_down(self, nextitem: Any) -> None:
        """The end of the run; what `nextitem` needs, too, stays."""
        self.teardown = _call_and_report(self._item, "teardown", log=False, nextitem=nextitem)

    def all(self) -> list[Any]:
        """The reports, in order."""
        return [report for report in (self.setup, self.call, self.teardown) if report is not None]

    @property
    def passed(self) -> bool:
        """Whether the test itself did well, also where its xfail mark says that it must not."""
        return self.call is not None and all(each.passed or _is_strict(each) for each in self.all())

    def failure(self) -> Any | None:
        """The first report of something that went wrong, expected or not."""
        found = (each for each in self.all() if each.failed or (each.skipped and hasattr(each, "wasxfail")))
        return next((each for each in found if not _is_strict(each)), None)


def _is_strict(report: Any) -> bool:
    """It passed, and its xfail mark does not allow that."""
    return report.failed and isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT)


# Partitions that leave their members, as when these are taken for dead: for a stranger that takes them all and gives
# them back at once, or for nobody. The members learn of it as from any broker, join again, go on behind what is saved.

STRANGER: Final = "another-member"
SESSION_MS: Final = 30_000


class StrangersReply:
    """Its answer is not looked at: what it was given shows in what the others lose."""

    silent = True

    def ok(self, *fields: Any, body: Any = b"") -> None:
        """It has joined, or left."""

    def error(self, error: BaseException) -> None:
        """It may not join: then nothing but the leaving happens."""

    def body_done(self) -> None:
        """There is none."""


class StrangersSession:
    """A connection that stands for as long as the stranger is there. Hashed by identity."""

    identity = "another member, for a moment"
    operator = False
    number = 0

    def on_close(self, callback: Callable[[], None]) -> None:
        """It never breaks."""


def live_groups(engine: Engine, names: Iterable[str]) -> list[str]:
    """Those of `names` that have members now."""
    found = [engine.house.groups.find(name) for name in names]
    return [group.name for group in found if group is not None and group.members]


def expel(engine: Engine, name: str, *, stranger: bool) -> None:
    """All members of the group `name` are none any more; where `stranger`, another one asks for all they asked for."""
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
    engine.turn_ended()  # all is the stranger's before anybody else can ask


def dismiss(engine: Engine, name: str) -> None:
    """The stranger leaves; what it had is free."""
    group = engine.house.groups.find(name)
    stranger = None if group is None else group.members.get(STRANGER)
    if stranger is not None:
        request = LeaveGroup(name, STRANGER, stranger.joined)
        engine.leave_group(request, b"", StrangersReply(), StrangersSession())  # type: ignore[arg-type]
        engine.turn_ended()


# One run of a program against a simulated broker, with one accident in it, or none: then it notes what could happen.
#
# Steps are counted from 1: requests, in the order in which the broker serves them, and calls, by which the program asks
# its clients for something. The simulation does the same in every run, so a step of the run without an accident is the
# same step in the others, as long as the program does the same.

CRASH, LOST_REPLY, DUPLICATE, REBALANCE = KINDS = ("crash", "lost_reply", "duplicate", "rebalance")
RECOVERY_SECONDS: Final = 10.0
"""Behind an accident time goes on until all clients are back, but no longer: one may be of a mind never to return."""
ARRANGING: Final = frozenset(
    each.request.shape
    for each in BY_CODE.values()
    if each.name.startswith(("LIST_", "DESCRIBE_"))
    or each.name.endswith(("_TOPIC", "_SCHEDULE", "_HISTOGRAM"))
    or each.name in ("STATUS", "PING", "RESUME_PARTITION", "TRUNCATE", "RESET_GROUP")
)
"""An administrator's requests are served as ever: with them a test arranges what it is about, and looks at what came of
it. Nobody repeats them by himself."""


class Step(NamedTuple):
    """One request, or one call behind `request`. `members`: whether a group had members then."""

    request: int
    name: str
    members: bool
    call: int = 0


class Accident(NamedTuple):
    """`kind` is one of `KINDS`."""

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
    """What was asked for is done, and instead of the reply, whenever it comes, the connection breaks; then `then()`."""

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
    """A reply to FETCH, of which the trial learns whether it brought messages."""

    def __init__(self, reply: Any, trial: Trial) -> None:
        self._reply = reply
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._trial.delivered = self._trial.delivered or len(body) > 0
        self._reply.ok(*fields, body=body)


class Trial:
    """Give it to one `SimulatedBroker`; `happened` says whether the accident did."""

    def __init__(self, accident: Accident | None = None) -> None:
        self.accident = accident
        self.happened = False
        self.delivered = False
        """Whether any consumer got messages."""
        self.requests: list[Step] = []
        self.calls: list[Step] = []
        """Those before which members of groups had got messages."""
        self._count = 0
        self._groups: dict[str, None] = {}
        self._down = False
        self._world: World | None = None
        self._power_cut: Callable[[], None] | None = None

    def begins_at(self, world: World, power_cut: Callable[[], None]) -> None:
        """From now on it is this broker and its clients that this is about; `power_cut` crashes and starts it."""
        self._world, self._power_cut = world, power_cut

    def accidents(self, kinds: Sequence[str]) -> list[Accident]:
        """What can happen in a run like this one."""
        steps = {
            CRASH: self.requests,
            LOST_REPLY: self.requests,
            DUPLICATE: self.calls,
            REBALANCE: [step for step in self.requests if step.members],
        }
        return [Accident(kind, step) for kind in kinds for step in steps[kind]]

    # What the broker and its clients call

    def serve(self, engine: Any, request: Any, reply: Any, session: Any) -> Any | None:
        """The reply that the request is served with; None: it is not served."""
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
        """The program asks a client for something."""
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

    # What happens

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
        """Time goes on until every client that wants something is connected, and has been answered what it asked."""
        world = self._world
        assert world is not None
        world.advance_to(world.clock.monotonic() + RECOVERY_SECONDS, world.connected)
        world.settle()
