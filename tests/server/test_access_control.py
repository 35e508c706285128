"""The users of a running server: the file and its changes, what ends, what is logged, and what a start refuses."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.test_main import refused
from tests.server.wire import PATIENCE_SECONDS, Wire, batch, running
from tfmq.access.quotas import Quotas
from tfmq.access.rights import Need, Rights, parse_right
from tfmq.access.scram import ClientLogin, make_keys
from tfmq.access.users import User, save_users
from tfmq.errors import Busy, ConfigError, Forbidden, LoginFailed
from tfmq.protocol import commands
from tfmq.protocol.delayed_handle import Handle, format_handle
from tfmq.server.access_control import PASSWORDS_PER_SECOND, AccessControl


def user(name: str, *rights: str, password: str = "right", **quotas: int) -> User:
    keys = make_keys(password, bytes, iterations=4096)
    return User(name, keys, Rights(map(parse_right, rights)), Quotas(**quotas))


class Session:
    def __init__(self) -> None:
        self.identity = "a test"
        self.ended = False
        self.callbacks: list[Any] = []
        self.account: Any = None

    def on_close(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        self.ended = True
        for callback in self.callbacks:
            callback()


class Rig:
    def __init__(self, path: Path, *users: User) -> None:
        self.path, self.now = path, 0.0
        self.asked_again: list[str] = []
        broker: Any = SimpleNamespace(end_parked_fetches=self.asked_again.append)
        clock: Any = SimpleNamespace(monotonic=lambda: self.now)
        self.access = AccessControl(str(path), lambda *request: None, lambda: broker, clock, os.urandom)
        self.load(*users)

    def load(self, *users: User) -> None:
        save_users(str(self.path), {each.name: each for each in users})
        self.access.load()

    def admit(self, name: str) -> Any:
        session: Any = Session()
        account = self.access._accounts.get(name)
        session.account = self.access.admit(session, name, account.user.keys if account else None)
        return session


def test_another_file_applies_to_open_sessions(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "users", user("ann", "read:a"), user("bob"), user("cid"))
    ann, bob, cid = map(rig.admit, ("ann", "bob", "cid"))
    rig.load(user("ann", "read:b"), user("bob", password="other"), user("dan"))
    assert [each.ended for each in (ann, bob, cid)] == [False, True, True]
    assert rig.asked_again == ["ann"], "a fetch that waits needs the new rights, too"
    assert ann.account.allow(Need(("read",), "b")) and not ann.account.allow(Need(("read",), "a"))
    assert rig.admit("dan").account.name == "dan"
    with pytest.raises(LoginFailed):
        rig.admit("cid")


def test_a_login_that_began_with_another_password_does_not_end_after_the_change(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "users", user("ann"))
    login, client = rig.access.new_login(), ClientLogin("ann", "right")
    answer, _ = login.answer(client.first())
    rig.load(user("ann", password="other"))
    assert login.answer(client.final(answer))[1]
    session: Any = Session()
    with pytest.raises(LoginFailed):
        rig.access.admit(session, "ann", login.keys)


def test_what_a_killed_program_left_does_not_give_its_mode_to_the_file_of_users(tmp_path: Path) -> None:
    left = tmp_path / "users.new"
    left.write_text("")
    left.chmod(0o666)
    Rig(tmp_path / "users", user("ann"))
    assert (tmp_path / "users").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "users", user("ann"))
    ann = rig.admit("ann")
    (tmp_path / "users").write_text('{"version": 1, "users": {"bob": {}}}')
    with pytest.raises(ConfigError, match="the user bob must have keys and rights"):
        rig.access.load()
    assert not ann.ended and rig.admit("ann")


def test_connections_above_the_quota_wait_for_others_to_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "users", user("ann", connections=2))
    first, _ = rig.admit("ann"), rig.admit("ann")
    with pytest.raises(Busy, match=r"allows, 2: .* `tfmq user quota ann --connections N`"):
        rig.admit("ann")
    first.end()
    rig.admit("ann")


def test_a_password_over_http_is_checked_so_many_times_a_second(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "users", user("ann"))
    assert rig.access.check_password("ann", "right").name == "ann"
    for number in range(1, PASSWORDS_PER_SECOND):
        with pytest.raises(LoginFailed):
            rig.access.check_password(("ann", "nobody")[number % 2], "wrong")
    with pytest.raises(Busy):
        rig.access.check_password("ann", "wrong")
    assert rig.access.check_password("ann", "right")  # was right before, so it costs nothing
    rig.load(user("ann", password="other"))
    with pytest.raises(Busy):
        rig.access.check_password("ann", "right")
    rig.now = 1.0
    with pytest.raises(LoginFailed):
        rig.access.check_password("ann", "right")
    assert rig.access.check_password("ann", "other")


def test_refusals_are_logged_without_secrets_and_limited_as_peers_cause_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tfmq.audit")
    rig = Rig(tmp_path / "users", user("ann"))
    ann, failures = rig.admit("ann"), []
    reply: Any = SimpleNamespace(error=failures.append)
    rig.access.handle(commands.DeleteTopic("orders"), b"", reply, ann)
    rig.access.log_failed_login("ann", "10.0.0.1:5")
    rig.access.log_failed_login("my secret password", "10.0.0.1:5")
    assert isinstance(failures[0], Forbidden) and failures[0].right == "manage:orders"
    assert caplog.messages == [
        "DeleteTopic refused to a test: it needs manage:orders",
        "login of the user ann from 10.0.0.1:5 failed",
        "login of a name that no user can have from 10.0.0.1:5 failed",
    ]
    assert all(getattr(record, "by_peer", False) for record in caplog.records)


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (None, 0o600, "the file cannot be read: No such file or directory. `tfmq user add NAME --file"),
        ("{", 0o600, "it is not JSON"),
        ("[" * 100_000, 0o600, "it is not JSON"),
        ('{"version": 2, "users": {}}', 0o600, "it is not a file of users of version 1"),
        ('{"version": 1, "users": {}, "more": 1}', 0o600, "it is not a file of users of version 1"),
        ('{"version": 1, "users": {"a b": {"keys": {}, "rights": []}}}', 0o600, "'a b' cannot name a user"),
        ('{"version": 1, "users": {"a": {"keys": {}, "rights": []}}}', 0o600, "the keys of a must have salt"),
        ('{"version": 1, "users": {}}', 0o602, "every user of this machine may change it"),
    ],
)
def test_a_start_with_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, mode: int, sentence: str
) -> None:
    path = tmp_path / "users"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    code, line = refused("--data", str(tmp_path / "data"), "--set", f"server.users={path}", "--check-config")
    assert code == 2 and sentence in line


def test_a_wrong_right_in_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "users"
    save_users(str(path), {"ann": user("ann", "read:orders")})
    path.write_text(path.read_text().replace("read:orders", "raed:orders"))
    code, line = refused("--data", str(tmp_path / "data"), "--set", f"server.users={path}")
    assert code == 2 and "the rights of ann: 'raed:orders' is no right: a right begins with one of read" in line


@pytest.mark.long
def test_a_file_without_users_admits_nobody_and_a_wrong_one_keeps_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "users"
    save_users(str(path), {})
    with running(tmp_path / "data", "--set", f"server.users={path}") as (process, address):
        wire = Wire(address)
        wire.send(commands.Ping())
        assert wire.receive().header[2] == "login_failed"
        path.write_text("{")
        process.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert "the configuration stays as it was: server.users is" in process.stop()[2]


@pytest.mark.long
def test_the_oldest_connection_without_a_login_makes_room_for_a_new_one(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "limits.connections_before_login=5", "--set", "limits.connections=8") as (
        process,
        address,
    ):
        honest = Wire(address)
        flood = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(5)]
        time.sleep(1.1)
        later = Wire(address)
        with pytest.raises(ConnectionResetError):
            flood[0].recv(1)
        for each in flood[1:]:
            each.settimeout(0.05)
            with pytest.raises(TimeoutError):
                each.recv(1)
        assert honest.ask(commands.Ping()) and later.ask(commands.Ping())
        for each in flood:
            each.close()
        assert "too many connections that have not sent HELLO" in process.stop()[2]


def logged_in(address: tuple[str, int], name: str) -> Wire:
    """A connection of a user with the password "right"."""
    wire, login = Wire(address), ClientLogin(name, "right")
    data, _ = wire.ask(commands.Authenticate("SCRAM-SHA-256", login.first()))
    data, done = wire.ask(commands.Authenticate("SCRAM-SHA-256", login.final(data)))
    login.check(data)
    assert done
    return wire


def code_of(wire: Wire, request: Any, body: bytes = b"") -> str:
    wire.send(request, body)
    header = wire.receive().header
    return "ok" if header[0] == 0 else header[2]


@pytest.mark.long
def test_a_prepared_transaction_stays_with_its_user_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "users"
    users = [user("ann", "write:*", "manage:*"), user("bob", "write:*"), user("operator", "transactions")]
    save_users(str(path), {each.name: each for each in users})
    settings = ("--set", f"server.users={path}")
    with running(tmp_path / "data", *settings) as (process, address):
        ann, bob = logged_in(address, "ann"), logged_in(address, "bob")
        epochs, incarnation = {}, ann.topic("orders")
        for xid in ("one", "two"):
            producer = ann.ask(commands.LeaseProducerIds(1))[0]
            epochs[xid] = ann.ask(commands.BeginTransaction(producer, 1, xid, None, ""))[0]
            assert code_of(bob, commands.PrepareTransaction(xid, epochs[xid], None, [])) == "forbidden"
            send, body = batch("orders", incarnation, producer, 0, [b"payload"])
            send = send._replace(transaction=epochs[xid])
            assert code_of(bob, send, body) == "forbidden"
            ann.ask(send, body)
            ann.ask(commands.PrepareTransaction(xid, epochs[xid], None, []))
        process.stop()
    with running(tmp_path / "data", *settings) as (_, address):
        ann, bob, operator = (logged_in(address, name) for name in ("ann", "bob", "operator"))
        rollback = {xid: commands.RollbackTransaction(xid, epochs[xid]) for xid in epochs}
        assert code_of(bob, commands.DescribeTransaction("one")) == "forbidden"
        assert [code_of(each, rollback["one"]) for each in (bob, ann)] == ["forbidden", "ok"]
        assert code_of(operator, rollback["two"]) == "ok"


def test_a_fetch_that_waits_gets_nothing_after_the_right_to_read_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "users"
    save_users(str(path), {"ann": user("ann", "read:orders", "write:orders", "manage:orders")})
    with running(tmp_path / "data", "--set", f"server.users={path}") as (process, address):
        ann = logged_in(address, "ann")
        fetch = commands.Fetch("orders", ann.topic("orders"), 0, 0, commands.EPOCH_UNKNOWN, 1 << 20, 60_000, 0, None)
        ann.send(fetch)
        ann.ask(commands.Ping())  # its reply comes first, because the fetch waits
        save_users(str(path), {"ann": user("ann", "write:orders")})
        process.process.send_signal(signal.SIGHUP)
        answer = ann.receive()
        assert answer.header[0] == 0 and not answer.body
        assert code_of(ann, fetch) == "forbidden"


def transact(topic: str, incarnation: int, producer: int, payload: bytes) -> tuple[commands.Transact, bytes]:
    """Transaction 1 of a producer id: one message."""
    send, body = batch(topic, incarnation, producer, 0, [payload])
    row = commands.TransactionBatch(topic, incarnation, 0, 0, 1, len(body), send.blocks)
    return commands.Transact(producer, 1, [row], []), body


@pytest.mark.long
def test_a_user_cannot_reach_what_others_send(tmp_path: Path) -> None:
    """By producer ids, which are easy to guess, and by handles of delayed messages, which are easy to make up."""
    path = tmp_path / "users"
    users = [user("ann", "write:a", "read:a"), user("bob", "write:b", "read:b"), user("eve"), user("op", "admin")]
    save_users(str(path), {each.name: each for each in users})
    with running(tmp_path / "data", "--set", f"server.users={path}") as (_, address):
        ann, bob, eve, op = (logged_in(address, each.name) for each in users)
        a, b = op.topic("a"), op.topic("b")
        assert code_of(eve, commands.LeaseProducerIds(1)) == "forbidden"
        producer = ann.ask(commands.LeaseProducerIds(1))[0]
        late = batch("b", b, producer, 0, [b"payload"])
        in_an_hour = ((1 << 63) + 3_600_000).to_bytes(8, "big")
        for request, body in (
            transact("b", b, producer, b"payload"),
            (late[0]._replace(due=in_an_hour), late[1]),
            (commands.BeginTransaction(producer, 1, "", None, ""), b""),
            (commands.Transact(producer, 1, [], []), b""),
            (commands.SucceedProducer("", 0, 0, producer), b""),
        ):
            assert code_of(bob, request, body) == "forbidden"
        assert not ann.ask(*transact("a", a, producer, b"payload"))[4]  # not a repetition
        send, body = batch("a", a, ann.ask(commands.LeaseProducerIds(1))[0], 0, [b"payload"])
        stored = ann.ask(send._replace(due=in_an_hour), body)[5]
        own = Handle(stored[0], a << 24, int.from_bytes(stored[3], "big"), stored[2])
        for spilled in (False, True):
            made_up = format_handle(own._replace(log_id=b << 24))
            assert bob.ask(commands.DescribeDelayed(made_up))[0]["state"] == "unknown"
            assert bob.ask(commands.CancelDelayed(made_up)) == ["unknown"]
            assert bob.ask(commands.RescheduleDelayed(made_up, 5)) == ["unknown", ""]
            early = format_handle(own._replace(due=own.due - 1))
            assert ann.ask(commands.CancelDelayed(early)) == ["unknown"]
            if not spilled:
                assert len(ann.ask(commands.ListDelayed("a"))[0]) == 1  # writes all to buckets
        assert ann.ask(commands.DescribeDelayed(format_handle(own)))[0]["topic"] == "a"
        state, moved = ann.ask(commands.RescheduleDelayed(format_handle(own), 1 << 62))
        assert state == "rescheduled"
        assert [ann.ask(commands.CancelDelayed(each)) for each in (format_handle(own), moved)] == [["cancelled"]] * 2


@pytest.mark.long
def test_other_connections_do_not_escape_a_quota(tmp_path: Path) -> None:
    path = tmp_path / "users"
    save_users(str(path), {"ann": user("ann", "write:a", bytes_per_second=20_000), "op": user("op", "admin")})
    with running(tmp_path / "data", "--set", f"server.users={path}") as (_, address):
        op, producer = logged_in(address, "op"), 0
        a = op.topic("a")
        began = time.monotonic()
        for _ in range(20):
            ann = logged_in(address, "ann")
            producer = ann.ask(commands.LeaseProducerIds(1))[0]
            ann.send(*batch("a", a, producer, 0, [b"x" * 10_000], commands.ACKS_NONE))
            time.sleep(0.01)
            ann.close()
        end = op.ask(commands.Locate("a", a, 0, commands.BY_LATEST))[4]
        assert end <= 20_000 * (time.monotonic() - began + 1) + 11_000
