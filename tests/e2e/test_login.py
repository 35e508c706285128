"""Logins with real processes: the file that `tfmq user` writes, and every kind of client."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tfmq
from tests.e2e import commands
from tests.e2e.test_tls import PAYLOADS, asynchronous, blocking, in_a_reactor, on_the_command_line
from tests.server.wire import Process, running
from tfmq.errors import LoginFailed

PASSWORD = "a secret%"
ENCODED = "a%20secret%25"
SECONDS = 20.0


class Server(NamedTuple):
    process: Process
    address: str
    users: Path

    def user(self, *arguments: str, password: str = "") -> commands.Ended:
        flags = ["--password-stdin"] if password else []
        ended = commands.tfmq("user", *arguments, "--file", str(self.users), *flags, given=password.encode())
        assert ended.code == 0, ended.err
        return ended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("login")
    users = folder / "users.json"
    made = Server(None, "", users)  # type: ignore[arg-type]
    made.user("add", "billing", "--right", "admin", password=PASSWORD)
    with running(folder / "data", "--set", f"server.users={users}") as (process, (host, port)):
        yield made._replace(process=process, address=f"{host}:{port}")
        _, _, err = process.stop()
        assert "Traceback" not in err and PASSWORD not in err and ENCODED not in err


@pytest.mark.parametrize("client", [blocking, asynchronous, in_a_reactor, on_the_command_line])
def test_every_kind_of_client_logs_in(server: Server, client: Callable[[str, str], list[bytes]]) -> None:
    assert client(f"tfmq://billing:{ENCODED}@{server.address}", client.__name__) == PAYLOADS


def test_the_password_can_be_in_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_PASSWORD", PASSWORD)
    with tfmq.Admin(f"billing@{server.address}") as admin:
        assert admin.topics() is not None
    listed = commands.tfmq("topic", "list", "--json", servers=f"tfmq://billing@{server.address}")
    assert listed.code == 0 and PASSWORD not in listed.err


def refused(servers: str, *arguments: str) -> str:
    ended = commands.tfmq(*arguments, servers=servers)
    assert ended.code == 1 and not ended.out
    return ended.sentence


def test_a_wrong_login_is_one_sentence(server: Server) -> None:
    sentence = refused(f"tfmq://billing:0ther@{server.address}", "read", "t")
    assert sentence.startswith(f"tfmq: tfmq://billing@{server.address}: The broker did not accept the login")
    assert "0ther" not in sentence
    assert "wants a login: write tfmq://USER@" in refused(server.address, "status", "--json")


def test_another_password_ends_connections_and_fails_the_next_requests(server: Server) -> None:
    server.user("add", "changing", "--right", "admin", password="before")
    server.process.process.send_signal(signal.SIGHUP)
    with tfmq.Producer(f"tfmq://changing:before@{server.address}") as producer:
        _until(lambda: producer.send("changing", b"1").result(SECONDS))
        server.user("password", "changing", password="after")
        server.process.process.send_signal(signal.SIGHUP)
        with pytest.raises(LoginFailed):
            _until(lambda: _send_for_ever(producer), errors=())
    with tfmq.Producer(f"tfmq://changing:after@{server.address}") as producer:
        producer.send("changing", b"2").result(SECONDS)


def _send_for_ever(producer: tfmq.Producer) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        producer.send("changing", b"x").result(SECONDS)
        time.sleep(0.02)


def _until(action: Callable[[], object], errors: tuple[type[Exception], ...] = (LoginFailed,)) -> None:
    """Repeat until it works: the server reads the file a moment after the signal."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            action()
            return
        except errors:
            assert time.monotonic() < until


def test_a_trace_with_the_right_to_read_alone_names_what_it_cannot_show(server: Server) -> None:
    for name, right in (("tracer", "read:traced"), ("sender", "write:traced"), ("watching", "admin")):
        server.user("add", name, "--right", right, password=name)
    server.process.process.send_signal(signal.SIGHUP)
    with tfmq.Producer(f"tfmq://billing:{ENCODED}@{server.address}") as producer:
        with producer.transaction() as transaction:
            transaction.send("traced", b"1", partition=0)
        later = producer.send("traced", b"2", partition=0, delay=0.2).result(SECONDS)
    addresses = {name: f"tfmq://{name}:{name}@{server.address}" for name in ("tracer", "sender", "watching")}
    _until(lambda: tfmq.Admin(addresses["watching"]).close())
    with tfmq.Admin(addresses["watching"]) as admin:
        _until_delivered(admin, later.delayed)
        whole = admin.trace("traced", 0, 0)
        assert whole.groups == () and whole.transaction is not None and whole.transaction.state == "committed"
    with tfmq.Admin(addresses["tracer"]) as admin:
        found = admin.trace("traced", 0, 0)
        assert found.groups is None and found.transaction is None and found.commit_lsn == whole.commit_lsn
        same = ("message_id", "durable", "appended_ms", "born_ms", "source", "end_offset")
        assert [getattr(found, each) for each in same] == [getattr(whole, each) for each in same]
        assert admin.trace_delayed(later.delayed).payload_bytes == 1
    with tfmq.Admin(addresses["sender"]) as admin:
        hidden = admin.trace_delayed(later.delayed)
        assert (hidden.state, hidden.offset, hidden.groups) == ("delivered", None, None)
        assert hidden.unknown == ("Where it is: The user sender needs the right read:traced.",)
    ended = commands.tfmq("trace", "traced/0/0", servers=addresses["tracer"])
    assert ended.code == 0, ended.err
    text = ended.out.decode()
    assert "Its transaction: The user tracer needs the right transactions or monitor." in text
    assert "Which groups have passed it: that needs the right monitor." in text
    assert "no group reads the topic" not in text and "appended" in text


def _until_delivered(admin: tfmq.Admin, handle: str) -> None:
    until = time.monotonic() + SECONDS
    while admin.describe_delayed(handle).state != "delivered":
        assert time.monotonic() < until
        time.sleep(0.05)
