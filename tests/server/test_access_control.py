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
        broker: Any = SimpleNamespace(fetches=SimpleNamespace(end_parked=self.asked_again.append))
        clock: Any = SimpleNamespace(monotonic=lambda: self.now)
        self.access = AccessControl(str(path), lambda *request: None, lambda: broker, clock, os.urandom)
        self.load(*users)

    def load(self, *users: User) -> None:
        save_users(str(self.path), {each.name: each for each in users})
        self.access.load()

    def admit(self, name: str) -> Any:
        session: Any = Session()
        session.account = self.access.admit(session, name)
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
