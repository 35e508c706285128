"""One run of a program against a simulated broker, with one accident in it, or none: then it notes what could happen.

Steps are counted from 1: requests, in the order in which the broker serves them, and calls, by which the program asks
its clients for something. The simulation does the same in every run, so a step of the run without an accident is the
same step in the others, as long as the program does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.protocol import commands
from tfmq.protocol.commands import BY_CODE, BY_REQUEST
from tfmq.testing.takeover import dismiss, expel, live_groups
from tfmq.testing.world import World

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
