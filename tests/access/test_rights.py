"""Rights: each command of the protocol needs those of this table, and no other user may send it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfmq.access.quotas import Quotas
from tfmq.access.rights import ACTIONS, RULES, Need, Right, Rights, parse_right
from tfmq.access.scram import Keys
from tfmq.access.users import User
from tfmq.errors import BadRequest, Forbidden, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import COMMANDS, Command
from tfmq.protocol.delayed_handle import Handle, format_handle
from tfmq.protocol.schema import ByteString, Flag, Integer, Kind, ListOf, Map, Name, Optional, Record, Text
from tfmq.server import access_control
from tfmq.server.access_control import AccessControl, Account, GivenIds

KEYS = Keys(b"salt", 4096, b"\0" * 32, b"\0" * 32)
NO_QUOTAS = Quotas()
HANDLE = format_handle(Handle(store_id=1, log_id=7 << 24, due=5, number=6))
"""The handle of a delayed message for the topic with incarnation 7, which is `orders`."""

NEEDED: dict[str, str] = {
    "PING": "",
    "STATUS": "monitor",
    "PROMOTE_REPLICA": "admin",
    "CANCEL": "",
    "METADATA": "write:orders",
    "CREATE_TOPIC": "manage:orders",
    "GROW_TOPIC": "manage:orders",
    "DELETE_TOPIC": "manage:orders",
    "DESCRIBE_TOPIC": "read:orders",
    "RESUME_PARTITION": "manage:orders",
    "TRUNCATE": "manage:orders",
    "SET_TOPIC": "manage:orders",
    "LEASE_PRODUCER_IDS": "write:*",
    "PRODUCE": "write:orders transactions",
    "SUCCEED_PRODUCER": "write:orders",
    "FETCH": "read:orders",
    "LOCATE": "read:orders",
    "JOIN_GROUP": "group:billing read:orders",
    "HEARTBEAT": "group:billing read:orders",
    "LEAVE_GROUP": "group:billing",
    "COMMIT_OFFSETS": "group:billing",
    "READ_OFFSETS": "group:billing",
    "LIST_GROUPS": "",
    "DESCRIBE_GROUP": "group:billing",
    "RESET_GROUP": "manage-group:billing read:orders",
    "DELETE_GROUP": "manage-group:billing",
    "BEGIN_TRANSACTION": "group:billing",
    "PREPARE_TRANSACTION": "group:billing transactions",
    "COMMIT_TRANSACTION": "group:billing transactions",
    "ROLLBACK_TRANSACTION": "transactions",
    "FORGET_TRANSACTION": "transactions",
    "LIST_TRANSACTIONS": "group:billing",
    "DESCRIBE_TRANSACTION": "transactions",
    "TRANSACT": "write:orders group:billing",
    "AWAIT_CHECKS": "group:billing",
    "CANCEL_DELAYED": "write:orders",
    "RESCHEDULE_DELAYED": "write:orders",
    "LIST_DELAYED": "read:orders",
    "DESCRIBE_DELAYED": "read:orders",
    "DELAYED_HISTOGRAM": "read:orders",
    "ADD_SCHEDULE": "schedule:nightly write:orders",
    "LIST_SCHEDULES": "schedule:nightly",
    "PAUSE_SCHEDULE": "schedule:nightly",
    "RESUME_SCHEDULE": "schedule:nightly",
    "REMOVE_SCHEDULE": "schedule:nightly",
    "COMMIT_GROUP": "group:billing transactions",
    "ABORT_COMMIT_GROUP": "group:billing",
    "LIST_COMMIT_GROUPS": "monitor",
    "FORGET_COMMIT_GROUP": "manage-group:billing",
}
"""Command -> the rights that its request of `sample` needs, all of them. Transactions in it belong to another user."""

NAMES: dict[str, Any] = {"topic": "orders", "topics": ["orders"], "group": "billing", "name": "nightly", "run": "r"}


def sample(kind: Kind, name: str) -> Any:
    """A value that the kind accepts, with the names of `NAMES`."""
    if name in NAMES:
        return NAMES[name]
    if isinstance(kind, Optional):
        return sample(kind.kind, name)
    if isinstance(kind, ListOf):
        return [sample(kind.kind, "")]
    if isinstance(kind, Record):
        return kind.shape(*(sample(each, field) for each, field in zip(kind.kinds, kind.names, strict=True)))
    if isinstance(kind, Integer):
        return max(1, kind.low)
    if isinstance(kind, Name | Text):
        return HANDLE if name == "handle" else "text"
    if isinstance(kind, ByteString):
        return b"12345678"
    assert isinstance(kind, Flag | Map), kind
    return True if isinstance(kind, Flag) else {}


class Reply:
    correlation = 1

    def __init__(self) -> None:
        self.failure: TfmqError | None = None

    def body_done(self) -> None: ...

    def appended(self) -> None: ...

    def ok(self, *fields: Any, body: Any = b"") -> None: ...

    def error(self, error: Any) -> None:
        self.failure = error


class Topics(list[str]):
    def by_incarnation(self, number: int) -> str | None:
        return "orders" if number == 7 else None


class Broker:
    """A broker that has the topics `orders` and `secret`, and transactions of the user `mary`."""

    topics = Topics(["orders", "secret"])
    transaction_commands = SimpleNamespace(find_user=lambda xid, epoch: "mary")


class Rig:
    """Access control with one user; `ask` returns the error, or None if the request reached the broker."""

    def __init__(self, *rights: str, quotas: Quotas = NO_QUOTAS, now: Any = lambda: 0.0) -> None:
        self.executed: list[Any] = []
        self.access = AccessControl("", self.execute, lambda: Broker(), SimpleNamespace(monotonic=now), bytes)  # type: ignore[arg-type, return-value]
        user = User("ann", KEYS, Rights(map(parse_right, rights)), quotas)
        self.paused: list[tuple[float, Any]] = []
        self.session: Any = SimpleNamespace(
            account=Account(user, now), identity="a test", pause_for=lambda *pause: self.paused.append(pause)
        )

    def execute(self, request: Any, body: Any, reply: Any, session: Any) -> None:
        self.executed.append((request, reply))

    def ask(self, request: Any, body: bytes = b"") -> TfmqError | None:
        reply = Reply()
        before = len(self.executed)
        self.access.handle(request, body, reply, self.session)
        assert (reply.failure is None) == (len(self.executed) > before)
        return reply.failure


CHECKED = [each for each in COMMANDS if each.request.shape not in (commands.Hello, commands.Authenticate)]


@pytest.mark.parametrize("command", CHECKED, ids=lambda each: each.name)
def test_every_command_needs_its_rights_and_each_of_them(command: Command) -> None:
    """A command that is not in the table, or has no rule, fails here."""
    request, needed = sample(command.request, ""), NEEDED[command.name].split()
    assert RULES[command.request.shape]
    assert Rig(*needed).ask(request) is None
    assert Rig("admin").ask(request) is None
    for missing in needed:
        others = [each for each in needed if each != missing]
        elsewhere = [f"{action}:other-*" for action, each in ACTIONS.items() if each.of and missing != "write:*"]
        found = Rig(*others, *elsewhere).ask(request)
        assert isinstance(found, Forbidden) and missing.partition(":")[2] in found.sentence
    if not needed:
        assert Rig().ask(request) is None


def test_a_command_without_a_rule_is_refused() -> None:
    every_right = [f"{action}:*" if each.of else action for action, each in ACTIONS.items() if action != "admin"]
    assert isinstance(Rig(*every_right).ask(commands.Hello("TFMQ", 1, 1, "", {})), Forbidden)


def test_a_session_without_a_user_may_nothing() -> None:
    rig = Rig("admin")
    rig.session.account = None
    assert isinstance(rig.ask(commands.Ping()), Forbidden)


def test_a_list_of_all_topics_has_only_those_that_the_user_may_see() -> None:
    rig, shown = Rig("write:or*"), []
    rig.ask(commands.Metadata())
    reply = rig.executed[0][1]
    reply._reply.ok = lambda *fields, body: shown.append(fields)
    reply.ok([("orders", 7, [], {}), ("secret", 8, [], {})])
    assert shown == [([("orders", 7, [], {})],)]


def test_a_list_of_groups_has_only_those_that_the_user_may_see() -> None:
    rows: list[Any] = [{"group": "billing"}, {"group": "secret"}]
    for right, seen in (
        ("group:bill*", rows[:1]),
        ("manage-group:secret", rows[1:]),
        ("monitor", rows),
        ("read:*", []),
    ):
        rig, shown = Rig(right), []
        rig.ask(commands.ListGroups())
        reply = rig.executed[0][1]
        reply._reply.ok = lambda *fields, body, shown=shown: shown.append(fields)
        reply.ok(rows)
        assert shown == [(seen, right != "monitor")]


def test_unknown_handles_and_wrong_ones_reach_the_broker_or_are_refused() -> None:
    foreign = format_handle(Handle(store_id=1, log_id=8 << 24, due=5, number=6))
    assert Rig().ask(commands.CancelDelayed(foreign)) is None  # of a deleted topic: the broker does not know it
    assert isinstance(Rig().ask(commands.CancelDelayed("d123")), BadRequest)


def test_a_transaction_belongs_to_the_user_who_began_it() -> None:
    own, other = Rig("group:billing"), Rig("group:billing")
    own.session.account = Account(User("mary", KEYS, Rights([Right("group", "billing")])), lambda: 0.0)
    for request in (commands.RollbackTransaction("x", 1), commands.CommitTransaction("x", 1, True, False, [])):
        assert own.ask(request) is None
        assert isinstance(other.ask(request), Forbidden)


@pytest.mark.parametrize(
    ("rights", "need", "allowed"),
    [
        ("read:orders", Need(("read",), "orders"), True),
        ("read:orders", Need(("read",), "orders-2"), False),
        ("read:orders", Need(("write",), "orders"), False),
        ("read:orders", Need(("write", "read"), "orders"), True),
        ("read:or*s", Need(("read",), "orders"), True),
        ("read:or*", Need(("read",), "xorders"), False),
        ("read:a.b", Need(("read",), "axb"), False),
        ("read:*", Need(("read",), "anything"), True),
        ("monitor", Need(("read", "monitor"), "orders"), True),
        ("read:*", Need(("monitor",)), False),
        ("admin", Need(("transactions",)), True),
        ("", Need(("read",), "orders"), False),
    ],
)
def test_patterns_match_whole_names(rights: str, need: Need, allowed: bool) -> None:
    found = Rights(map(parse_right, rights.split()))
    assert found.allow(need) is allowed and found.allow(need) is allowed  # the second answer is from the cache


@pytest.mark.parametrize("text", ["", "fly:orders", "read", "read:", "admin:x", "read:or ders", "read:a:b", "READ:a"])
def test_what_is_no_right_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(BadRequest, match="is no right"):
        parse_right(text)


# Quotas, which are checked after the rights


def produce(acks: int = 2) -> commands.Produce:
    return commands.Produce("orders", 1, 0, 7, 0, 10, acks, [])


def test_a_used_up_quota_says_how_long_to_wait_and_then_accepts() -> None:
    time = [0.0]
    rig = Rig("write:*", quotas=Quotas(bytes_per_second=1000), now=lambda: time[0])
    assert rig.ask(produce(), b"x" * 3000) is None  # larger than a second's share, so that it is possible at all
    found = rig.ask(produce(), b"x")
    assert found is not None and (found.code, found.details) == ("busy", {"wait_ms": 2001})
    time[0] = 1.9
    assert rig.ask(produce(), b"x") is not None
    time[0] = 2.001
    assert rig.ask(produce(), b"x") is None


def test_messages_count_by_batch_and_over_all_connections() -> None:
    rig = Rig("write:*", quotas=Quotas(messages_per_second=5))
    first, second = Rig("write:*"), Rig("write:*")
    first.session.account = second.session.account = rig.session.account
    assert first.ask(produce()) is None
    found = second.ask(produce())
    assert found is not None and found.details == {"wait_ms": 1001}


def test_what_is_read_counts_when_it_is_sent() -> None:
    rig = Rig("read:*", quotas=Quotas(bytes_per_second=1000))
    fetch = sample(commands.BY_REQUEST[commands.Fetch].request, "")
    assert rig.ask(fetch) is None
    rig.executed[0][1].ok(body=[b"x" * 1500, b"y" * 500])
    found = rig.ask(fetch)
    assert found is not None and found.details == {"wait_ms": 1001}
    assert rig.ask(commands.Ping()) is None  # costs nothing


def test_a_send_without_an_answer_waits_and_reading_pauses_meanwhile() -> None:
    rig = Rig("write:*", quotas=Quotas(bytes_per_second=1000))
    assert rig.ask(produce(commands.ACKS_NONE), b"x" * 2000) is None
    for _ in range(2):
        rig.access.handle(produce(commands.ACKS_NONE), b"x" * 1000, Reply(), rig.session)
    assert len(rig.executed) == 1 and [seconds for seconds, _ in rig.paused] == [1.0, 2.0]
    rig.paused[0][1](True)
    rig.paused[1][1](False)  # the connection was closed
    assert len(rig.executed) == 2


def test_sends_that_wait_have_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "HELD_BYTES_MAX", 1500)
    rig = Rig("write:*", quotas=Quotas(bytes_per_second=1000))
    assert rig.ask(produce(commands.ACKS_NONE), b"x" * 2000) is None
    for _ in range(2):
        rig.access.handle(produce(commands.ACKS_NONE), b"x" * 1000, Reply(), rig.session)
    for _, then in rig.paused:
        then(True)
    assert len(rig.executed) == 2
    rig.access.handle(produce(commands.ACKS_NONE), b"x" * 1000, Reply(), rig.session)
    rig.paused[2][1](True)
    assert len(rig.executed) == 3


def test_producer_ids_belong_to_the_user_who_got_them() -> None:
    ids = GivenIds()
    ids.add(100, 10, "ann")
    ids.add(110, 5, "ann")
    ids.add(120, 1, "bob")
    ids.add(115, 1, "cid")
    assert [ids.user_of(each) for each in (99, 100, 114, 115, 116, 120, 121)] == [
        None, "ann", "ann", "cid", None, "bob", None,
    ]  # fmt: skip


def test_many_producer_ids_of_one_user_do_not_hide_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "GIVEN_RANGES_MAX", 10)
    ids = GivenIds()
    for first in range(100, 124, 2):
        ids.add(first, 1, "bob")
        ids.add(first + 1, 1, "ann" if first == 100 else "cid")
    assert [ids.user_of(each) for each in (100, 101, 102, 104, 122)] == [None, "ann", None, "bob", "bob"]


def test_an_id_for_delayed_messages_is_closed_only_by_those_who_may_send() -> None:
    succeed = commands.SucceedProducer("", 0, 0, 7)
    assert isinstance(Rig("read:*", "group:*").ask(succeed), Forbidden)
    assert Rig("write:a").ask(succeed) is None


def test_a_user_without_quotas_is_not_limited() -> None:
    rig = Rig("write:*")
    assert all(rig.ask(produce(), b"x" * 10_000) is None for _ in range(100))
