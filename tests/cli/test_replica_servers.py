"""`tfmq replica status`, `tfmq replica promote`, and what `tfmq status` shows of replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.client.fake_broker import FakeBroker, Session, listening
from tfmq.cli import replica_servers
from tfmq.client.connection.addresses import parse_servers
from tfmq.errors import Forbidden, NotAllowed, NotPrimary
from tfmq.protocol.commands import HelloReply, PromoteReplica, StateReply, Status, StatusReply

PRIMARY = {
    "role": "primary",
    "mode": "sync",
    "primary": "10.0.0.1:8367",
    "term": 7,
    "slot": 120,
    "stored_slot": 118,
    "behind_seconds": 0.25,
    "behind_bytes": 2048,
    "since_ms": 1_700_000_000_000,
    "store": "s3://bucket/orders",
    "trouble": "",
}
STANDBY = {
    **PRIMARY,
    "role": "standby",
    "behind_seconds": 90.0,
    "behind_bytes": 3 << 20,
    "trouble": "The store is slow.",
}


class Server(FakeBroker):
    """One server, with the replication map of its status; `promoted` is called for a hand-over."""

    def __init__(self, replication: dict[str, Any] | None, promoted: Callable[[Server], None] = lambda server: None):
        super().__init__()
        self.replication, self._promoted = replication, promoted
        self.asked = 0

    def open_session(self, broker: FakeBroker) -> Session:
        session = Session(self)
        role = (self.replication or {}).get("role")
        if role:
            session.greeting = lambda hello: hello._replace(properties={"role": role, "primary": self.named()})  # type: ignore[method-assign]
        return session

    def named(self) -> str:
        return str((self.replication or {}).get("primary", ""))

    def greeting(self, hello: HelloReply) -> HelloReply:
        return hello

    def status(self, request: Status) -> Any:
        self.asked += 1
        return StatusReply({"version": "tfmq 9"} | ({"replication": self.replication} if self.replication else {}))

    def promote_replica(self, request: PromoteReplica) -> Any:
        self._promoted(self)
        return StateReply("requested")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:
        yield lambda *servers: ",".join(stack.enter_context(listening(each, each.open_session)) for each in servers)


def become_primary(server: Server) -> None:
    server.replication = {**PRIMARY, "term": 8}


def test_each_server_has_its_line(offline: Cli, serve: Callable[..., str]) -> None:
    servers = serve(Server(PRIMARY), Server(STANDBY), Server(None)) + ",127.0.0.1:1"
    ran = offline("replica", "status", "--servers", servers, "--json")
    addresses = servers.split(",")
    assert [each["address"] for each in ran.json] == addresses
    assert [each["role"] for each in ran.json] == ["primary", "standby", None, "unreachable"]
    assert {key: ran.json[1][key] for key in STANDBY} == STANDBY
    assert ran.json[0]["trouble"] is None and ran.json[0]["since_at"] == "2023-11-14T22:13:20.000+00:00"
    assert "set replicate.url" in ran.json[2]["trouble"] and "Nothing listens at 127.0.0.1:1" in ran.json[3]["trouble"]
    table = offline("replica", "status", "--servers", ",".join(addresses[:3])).out.decode()
    for text in (
        "primary",
        addresses[1],
        "0.25 s, 2.0 KiB",
        "1 min 30 s, 3.0 MiB",
        "The store is slow.",
        "no replicas",
    ):
        assert text in table


def test_without_any_server_the_exit_code_says_so(offline: Cli) -> None:
    ran = offline("replica", "status", "--servers", "127.0.0.1:1,127.0.0.1:2", "--json")
    assert ran.code == 3 and [each["role"] for each in ran.json] == ["unreachable"] * 2


def test_a_server_that_refuses_to_answer_was_reached(offline: Cli, serve: Callable[..., str]) -> None:
    server = Server(PRIMARY)
    server.plan(Status, Forbidden("The user ann has no right monitor."))
    ran = offline("replica", "status", "--servers", serve(server), "--json")
    assert ran.code == 1 and ran.json[0]["role"] == "refused" and "no right monitor" in ran.json[0]["trouble"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_exit_code_is_0_only_if_all_replicate_and_one_is_primary(
    offline: Cli, serve: Callable[..., str], form: tuple[str, ...]
) -> None:
    primary, standby, slow, alone, second = serve(
        Server(PRIMARY), Server({**STANDBY, "trouble": ""}), Server(STANDBY), Server(None), Server(PRIMARY)
    ).split(",")
    for servers, code in (
        ([primary, standby], 0),
        ([primary, slow], 1),
        ([primary, standby, alone], 1),
        ([primary, standby, "127.0.0.1:1"], 1),
        ([standby], 1),
        ([primary, second], 1),
    ):
        assert offline("replica", "status", "--servers", ",".join(servers), *form).code == code, servers


@pytest.mark.parametrize(
    ("replications", "words"),
    [
        ((STANDBY, STANDBY), "none of these servers is primary"),
        ((PRIMARY, PRIMARY), "only the one with the highest term"),
    ],
)
def test_no_primary_and_too_many_are_mentioned(
    offline: Cli, serve: Callable[..., str], replications: Any, words: str
) -> None:
    ran = offline("replica", "status", "--servers", serve(*map(Server, replications)))
    assert words in ran.err


def test_texts_of_a_server_cannot_control_the_terminal(offline: Cli, serve: Callable[..., str]) -> None:
    servers = serve(Server({**STANDBY, "trouble": "a\x1b[31mb", "store": "\x07", "role": "x\x1b", "term": "many"}))
    for command in (("replica", "status"), ("status",)):
        ran = offline(*command, "--servers", servers)
        assert ran.out and b"\x1b" not in ran.out and b"\x07" not in ran.out and "\x1b" not in ran.err


def test_a_password_is_given_to_each_server_and_shown_to_nobody(offline: Cli) -> None:
    ran = offline("replica", "status", "--servers", "tfmq://ann:s3cret@127.0.0.1:1,127.0.0.1:2", "--json")
    assert "s3cret" not in ran.out.decode() + ran.err and ran.json[1]["address"] == "tfmq://ann@127.0.0.1:2"


@pytest.mark.parametrize(
    "text",
    ["a:1", "tfmqs://a:2?ca=%20x%26y&certificate=c%2Cd&key=k", "tfmqs://ann:p%40%2C%3F%25@[::1]:7", "tfmq://u:%20@h:1"],
)
def test_an_address_alone_keeps_its_login_and_its_files(text: str) -> None:
    (address,) = parse_servers(text)
    assert parse_servers(address.url()) == (address,)


# Promotion


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_servers, "CHECK_SECONDS", 0.01)


def test_a_standby_is_promoted_and_waited_for(offline: Cli, serve: Callable[..., str]) -> None:
    promoted: list[Server] = []
    server = Server(STANDBY, promoted.append)
    make = server.status

    def status(request: Status) -> Any:
        if promoted and server.asked == 3:
            become_primary(server)
        return make(request)

    server.status = status  # type: ignore[method-assign]
    address = serve(server)
    ran = offline("replica", "promote", "--servers", address)
    assert (ran.code, len(promoted)) == (0, 1)
    assert f"requested; waiting for 10.0.0.1:8367 to hand over to {address}" in ran.err
    assert f"{address} is primary, term 8" in ran.err
    again = offline("replica", "promote", "--servers", address)
    assert again.code == 0 and "is the primary already" in again.err and len(promoted) == 1
    found = offline("replica", "promote", "--servers", address, "--json").json
    assert found["promoted"] is False and found["role"] == "primary"


def test_a_promotion_is_asked_of_one_server_by_name(offline: Cli) -> None:
    ran = offline("replica", "promote", "--servers", "a:1,b:2")
    assert ran.code == 2 and "Name the one standby" in ran.err


def test_a_promotion_that_takes_longer_is_not_said_to_have_failed(offline: Cli, serve: Callable[..., str]) -> None:
    started = time.monotonic()
    ran = offline("replica", "promote", "--servers", serve(Server(STANDBY)), "--timeout", "0.2s")
    assert ran.code == 1 and "is not primary yet, and may still become it" in ran.err
    assert time.monotonic() - started < 10


def test_another_server_that_becomes_primary_ends_the_wait(offline: Cli, serve: Callable[..., str]) -> None:
    def other(server: Server) -> None:
        server.replication = {**STANDBY, "term": 8, "primary": "10.0.0.3:8367"}

    ran = offline("replica", "promote", "--servers", serve(Server(STANDBY, other)))
    assert ran.code == 1 and "another server has become primary instead: 10.0.0.3:8367" in ran.err
    assert "the primary is 10.0.0.3:8367 now" in ran.err


def test_what_cannot_be_promoted_is_an_error(offline: Cli, serve: Callable[..., str]) -> None:
    ran = offline("replica", "promote", "--servers", serve(Server(None)))
    assert ran.code == 1 and "set replicate.url" in ran.err
    ran = offline("replica", "promote", "--servers", "127.0.0.1:1")
    assert ran.code == 3

    def refuse(server: Server) -> None:
        raise NotAllowed("That is not allowed here.")

    ran = offline("replica", "promote", "--servers", serve(Server(STANDBY, refuse)))
    assert ran.code == 1 and "not allowed" in ran.err


# `tfmq status`


def test_the_status_has_a_row_for_replicas_and_names_the_trouble(offline: Cli, serve: Callable[..., str]) -> None:
    ran = offline("status", "--servers", serve(Server(STANDBY)))
    assert ran.code == 0
    assert "standby, term 7, sync, 1 min 30 s, 3.0 MiB behind, store s3://bucket/orders" in ran.out.decode()
    assert "replication: The store is slow." in ran.err
    assert "replication" not in offline("status", "--servers", serve(Server(None))).out.decode()


def test_the_status_of_several_servers_is_that_of_the_primary(
    offline: Cli, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    standby, primary = Server(STANDBY), Server(PRIMARY)
    servers = serve(standby, primary)
    assert offline("status", "--servers", servers, "--json").json["replication"]["role"] == "primary"
    monkeypatch.setattr(replica_servers, "REPLY_SECONDS", 0.2)
    primary.replication = STANDBY
    ran = offline("status", "--servers", servers)
    assert ran.code == 0 and "none of these servers is primary" in ran.err and "standby" in ran.out.decode()


def test_other_commands_say_why_a_standby_does_nothing_for_them(offline: Cli, serve: Callable[..., str]) -> None:
    ran = offline("topic", "list", "--servers", serve(Server(STANDBY)))
    assert ran.code == 3 and "is a standby, which takes no requests. 10.0.0.1:8367 is the primary: add it" in ran.err
    assert NotPrimary.code == "not_primary"
