"""Requests in, replies out: hello first, errors that go on or close, bodies held until they are done with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.server.fakes import EVERY_LIMIT, Net
from tfmq import errors, limits
from tfmq.access.rights import Rights
from tfmq.access.scram import ClientLogin, Login, decoys, make_keys
from tfmq.access.users import User
from tfmq.errors import BadRequest, Busy, DiskFull
from tfmq.limits import KIB
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_REQUEST
from tfmq.server.access_control import Account
from tfmq.server.session import LOGIN_FAILED_SECONDS, Reply, Session, SessionContext, unknown_command


class Engine:
    """Keeps the requests that it gets; the test answers them."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, Any, Reply, Session]] = []

    def take(self, request: Any, body: Any, reply: Reply, session: Session) -> None:
        self.requests.append((request, body, reply, session))

    def status(self) -> dict[str, Any]:
        return {"topics": 3, "connections": 1}


class Client:
    """One session over a fake socket, with verbs."""

    def __init__(self, limit: dict[str, int] | None = None, hello: bool = True, **welcome: Any) -> None:
        self.net = Net(limit)
        self.engine = Engine()
        self.sessions: set[Session] = set()
        every_limit = {**EVERY_LIMIT, **(limit or {})}
        self.session = Session(
            SessionContext(
                node="node-1",
                server="tfmq 9",
                address="127.0.0.1:8367",
                limits=every_limit,
                limits_sent=limits.limits_to_send({}),
                acks=2,
                call_later=self.net.reactor.callLater,
                turn_wanted=self.net.turn.request_end,
                status=lambda: self.engine.status(),
                **{
                    "handle": self.engine.take,
                    "opened": self.sessions.add,
                    "closed": self.sessions.discard,
                    "header_bounds": commands.header_bounds(),
                    **welcome,
                },
            )
        )
        self.connection, self.socket = self.net.connect(self.session)
        if hello:
            self.say_hello()
            self.replies()

    def say(self, request: Any, correlation: int = 1, body: bytes = b"") -> None:
        self.bring((BY_REQUEST[type(request)].code, correlation, *request), body)

    def bring(self, header: Any, body: bytes = b"") -> None:
        self.net.bring(self.connection, b"".join(frames.encode(header, body)))

    def say_hello(self, **changes: Any) -> None:
        hello = commands.Hello("TFMQ", 1, 1, "test", {})._replace(**changes)
        self.say(hello, 77)

    def replies(self) -> list[list[Any]]:
        """The headers of the replies that were sent since the last look; bodies follow them."""
        self.net.reactor.advance(0)
        found = []
        for header, body in frames.Decoder().feed(bytes(self.socket.sent)):
            found.append([*header, bytes(body)] if body else header)
        self.socket.sent.clear()
        return found

    @property
    def ended(self) -> bool:
        return self.socket.half_closed


def produce(acks: int = 2) -> commands.Produce:
    return commands.Produce("orders", 1, 0, 7, 0, 1, acks, [[5, 1, 0]])  # type: ignore[list-item]


def fetch() -> commands.Fetch:
    return commands.Fetch("orders", 1, 0, 0)


def test_hello_is_answered_with_what_the_client_must_know() -> None:
    client = Client(hello=False)
    client.say_hello()
    (reply,) = client.replies()
    assert reply[:2] == [0, 77]
    reported = commands.HelloReply(*reply[2:])
    assert (reported.version, reported.server, reported.node, reported.acks) == (1, "tfmq 9", "node-1", 2)
    assert reported.limits["frame_bytes"] == limits.FRAME_BYTES
    assert not client.ended


def test_before_hello_nothing_else_is_taken() -> None:
    client = Client(hello=False)
    client.say(commands.Ping())
    (reply,) = client.replies()
    assert reply[0] == -errors.BadFrame.number
    assert "HELLO" in reply[4]
    assert client.ended
    assert client.engine.requests == []


def test_before_hello_frames_are_small() -> None:
    client = Client(hello=False)
    client.net.bring(client.connection, (64 * KIB + 1).to_bytes(4, "big"))
    assert client.replies()[0][2] == "bad_frame"
    assert client.ended


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"magic": "KAFKA"}, "bad_frame"),
        ({"version_min": 2, "version_max": 9}, "version_mismatch"),
        ({"version_min": 0, "version_max": 0}, "version_mismatch"),
        ({"client": 7}, "bad_request"),
    ],
)
def test_a_wrong_hello_is_refused_and_the_connection_ends(changes: dict[str, Any], code: str) -> None:
    client = Client(hello=False)
    client.say_hello(**changes)
    assert [reply[2] for reply in client.replies()] == [code]
    assert client.ended


def test_a_second_hello_is_refused_and_the_connection_goes_on() -> None:
    client = Client()
    client.say_hello()
    assert client.replies()[0][2] == "bad_request"
    client.say(commands.Ping())
    assert len(client.engine.requests) == 1


def test_who_does_not_say_hello_in_time_is_cut_off() -> None:
    client = Client(hello=False)
    client.net.reactor.advance(limits.HELLO_SECONDS + 1)
    client.net.reactor.advance(0)
    assert client.socket.closed
    assert not client.sessions


def test_replies_go_out_in_the_order_in_which_the_engine_answers() -> None:
    client = Client()
    client.say(fetch(), 1)
    client.say(fetch(), 2)
    first, second = (request[2] for request in client.engine.requests)
    second.ok(1, 2, body=[b"some", b"", memoryview(b" bytes")])
    first.error(DiskFull())
    replies = client.replies()
    assert replies[0] == [0, 2, 1, 2, b"some bytes"]
    assert replies[1][:3] == [-DiskFull.number, 1, "disk_full"]
    assert not client.ended


def test_a_wrong_field_is_answered_and_the_connection_goes_on() -> None:
    client = Client()
    client.say(fetch()._replace(topic="../etc"), 5)
    (reply,) = client.replies()
    assert reply[:3] == [-BadRequest.number, 5, "bad_request"]
    assert not client.ended


@pytest.mark.parametrize(("code", "error"), [(65, "unknown_command"), (75, "not_supported"), (999, "unknown_command")])
def test_a_command_that_is_not_there_is_answered_and_the_connection_goes_on(code: int, error: str) -> None:
    client = Client()
    client.bring((code, 9))
    (reply,) = client.replies()
    assert reply[1:3] == [9, error]
    assert not client.ended


@pytest.mark.parametrize(
    "content", [b"\x00\x00\x00\x09abc", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x01", b"\x00\x00\x00\x00"]
)
def test_a_frame_without_sense_is_answered_and_the_connection_ends(content: bytes) -> None:
    client = Client()
    client.net.bring(client.connection, len(content).to_bytes(4, "big") + content)
    (reply,) = client.replies()
    assert reply[:3] == [-errors.BadFrame.number, 0, "bad_frame"]
    assert client.ended


def test_a_request_with_surplus_values_is_refused_and_the_connection_ends() -> None:
    client = Client()
    client.bring((commands.BY_REQUEST[commands.Ping].code, 9, *range(500)))
    (reply,) = client.replies()
    assert reply[:3] == [-errors.BadFrame.number, 0, "bad_frame"] and "502 fields" in reply[4]
    assert client.ended


def test_an_http_client_reads_what_this_port_is() -> None:
    client = Client(hello=False)
    client.net.bring(client.connection, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.net.reactor.advance(0)
    assert client.socket.sent.startswith(b"HTTP/1.1 400 ")
    assert b"127.0.0.1:8367" in client.socket.sent
    assert client.ended


def test_a_body_is_held_until_the_engine_has_done_with_it() -> None:
    client = Client()
    client.say(produce(), 3, b"hello")
    _, body, reply, _ = client.engine.requests[0]
    arena = client.net.traffic.arena.buffer
    assert (bytes(body), arena.holds) == (b"hello", 2)
    reply.body_done()
    assert arena.holds == 1
    reply.ok([[0, 0]], 2, False, 1, 0)
    assert client.replies() == [[0, 3, [[0, 0]], 2, False, 1, 0]]
    assert arena.holds == 1


@pytest.mark.parametrize("verb", ["ok", "error"])
def test_an_answer_gives_the_body_back_too(verb: str) -> None:
    client = Client()
    client.say(produce(), 3, b"hello")
    reply = client.engine.requests[0][2]
    reply.ok() if verb == "ok" else reply.error(DiskFull())
    assert client.net.all_given_back()
    assert client.net.traffic.arena.buffer.holds == 1


def test_only_the_first_answer_counts() -> None:
    client = Client()
    client.say(commands.Ping(), 4)
    reply = client.engine.requests[0][2]
    reply.ok(5)
    reply.error(DiskFull())
    assert client.replies() == [[0, 4, 5]]


def test_without_acknowledgement_nothing_is_sent() -> None:
    client = Client()
    client.say(produce(acks=0), 3, b"hello")
    client.engine.requests[0][2].ok([[0, 0]], 0, False, 1, 0)
    client.say(produce(acks=0), 4, b"hello")
    client.engine.requests[1][2].error(DiskFull())
    assert client.replies() == []


def test_status_has_the_engines_words_and_the_servers() -> None:
    client = Client()
    client.say(commands.Status())
    assert client.replies() == [[0, 1, {"topics": 3, "connections": 1}]]


def test_an_error_of_ours_shows_nothing_inside(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.say(commands.Ping())
    client.engine.requests[0][2].error(ZeroDivisionError("secret"))
    (reply,) = client.replies()
    assert reply[2] == "internal_error"
    assert "secret" not in str(reply)
    assert "secret" in caplog.text


def test_a_reply_too_large_to_send_becomes_an_error() -> None:
    client = Client()
    client.say(commands.Ping())
    client.engine.requests[0][2].ok("x" * (limits.HEADER_BYTES + 1))
    assert client.replies()[0][2] == "bad_request"


def test_above_its_limit_of_requests_a_session_is_answered_busy_and_not_read() -> None:
    client = Client({"requests_in_flight": 4})
    ping = b"".join(frames.encode((2, 1)))
    client.net.bring(client.connection, ping * 6)
    assert len(client.engine.requests) == 4
    assert [reply[2] for reply in client.replies()] == ["busy", "busy"]
    assert client.connection not in client.net.reactor.readers
    client.engine.requests[0][2].ok(0)
    assert client.connection in client.net.reactor.readers
    client.say(commands.Ping())
    assert len(client.engine.requests) == 5


def test_the_engine_may_pause_a_session() -> None:
    client = Client()
    client.session.pause()
    assert client.connection not in client.net.reactor.readers
    client.session.resume()
    assert client.connection in client.net.reactor.readers


def test_a_waiter_for_the_end_is_notified_once_and_replies_are_dropped() -> None:
    client = Client()
    reported: list[str] = []
    client.session.on_close(lambda: reported.append("failing") or 1 // 0)
    client.session.on_close(lambda: reported.append("before"))
    client.say(produce(), 1, b"hello")
    client.net.bring(client.connection, b"")
    client.engine.requests[0][2].ok(1)
    client.session.on_close(lambda: reported.append("behind"))
    assert reported == ["failing", "before", "behind"]
    assert not client.sessions
    assert client.net.traffic.arena.buffer.holds == 1


@pytest.mark.parametrize(("details", "operator"), [({"operator": True}, True), ({"operator": "x"}, False), ({}, False)])
def test_a_client_says_whether_an_operator_uses_it(details: dict[str, Any], operator: bool) -> None:
    client = Client(hello=False)
    client.say_hello(details=details)
    assert client.session.operator is operator


def test_people_see_who_a_session_is() -> None:
    assert Client().session.identity == "test at 127.0.0.1:50000"
    forger = Client(hello=False)
    forger.say_hello(client="x\nERROR forged" + "y" * 200)
    assert forger.session.identity.startswith("x?ERROR forgedyyy")
    assert len(forger.session.identity) < 130


def test_a_code_of_a_later_release_is_distinguished_from_an_unknown_one() -> None:
    assert unknown_command(79).code == "not_supported"
    assert "more commands about schedules" in str(unknown_command(79))
    assert unknown_command(4711).code == "unknown_command"
    assert "4711" in str(unknown_command(4711))


# Logins


class Access:
    """Users as `AccessControl` has them: ann, who may log in once at a time."""

    def __init__(self) -> None:
        self.user = User("ann", make_keys("right", bytes, iterations=4096), Rights([]))
        self.failed: list[tuple[str, str]] = []
        self.full = False

    def new_login(self) -> Any:
        return Login({"ann": self.user.keys}.get, decoys(b"x"))

    def admit(self, session: Session, name: str, keys: Any) -> Account:
        if self.full:
            raise Busy("no more")
        return Account(self.user, lambda: 0.0)

    def log_failed_login(self, name: str, peer: str) -> None:
        self.failed.append((name, peer))

    def check(self, request: Any, reply: Reply, session: Session) -> bool:
        reply.error(errors.Forbidden("no"))
        return False


def login(client: Client, password: str, mechanism: str = "SCRAM-SHA-256") -> list[list[Any]]:
    """Both messages of a login; the replies to the last one that was answered."""
    end = ClientLogin("ann", password)
    client.say(commands.Authenticate(mechanism, end.first()), 5)
    replies = client.replies()
    if replies and replies[0][0] == 0:
        client.say(commands.Authenticate(mechanism, end.final(replies[0][2])), 6)
        replies = client.replies()
    return replies


def test_hello_names_the_login_and_requests_wait_for_it() -> None:
    access = Access()
    client = Client(hello=False, access=access)
    client.say_hello()
    assert client.replies()[0][-2] == ["scram-sha-256"]
    [(zero, correlation, _, done)] = login(client, "right")
    assert (zero, correlation, done) == (0, 6, True)
    assert (client.session.user, client.session.identity) == ("ann", "test of user ann at 127.0.0.1:50000")
    client.say(produce())
    assert len(client.engine.requests) == 1
    client.say(commands.Status())
    assert client.replies()[0][2] == "forbidden"
    client.say(commands.Authenticate("SCRAM-SHA-256", b""))
    assert client.replies()[0][2] == "bad_request" and not client.ended


@pytest.mark.parametrize("request_", [produce(), commands.Ping(), commands.Status()])
def test_before_the_login_nothing_else_is_accepted(request_: Any) -> None:
    client = Client(hello=False, access=Access())
    client.say_hello()
    client.replies()
    client.say(request_)
    assert client.replies()[0][2] == "login_failed"
    assert client.ended and not client.engine.requests


def test_frames_stay_small_and_the_time_runs_until_the_login() -> None:
    client = Client(hello=False, access=Access())
    client.say_hello()
    assert client.session.frame_bytes == limits.FRAME_BYTES_BEFORE_HELLO
    client.net.reactor.advance(EVERY_LIMIT["hello_seconds"] + 1)
    assert client.session.is_closed
    logged_in = Client(hello=False, access=Access())
    logged_in.say_hello()
    logged_in.replies()
    login(logged_in, "right")
    logged_in.net.reactor.advance(EVERY_LIMIT["hello_seconds"] + 1)
    assert not logged_in.ended and logged_in.session.frame_bytes == EVERY_LIMIT["frame_bytes"]


@pytest.mark.parametrize(("password", "mechanism"), [("wrong", "SCRAM-SHA-256"), ("right", "PLAIN"), ("right", "")])
def test_a_failed_login_is_answered_late_and_ends_the_connection(password: str, mechanism: str) -> None:
    access = Access()
    client = Client(hello=False, access=access)
    client.say_hello()
    client.replies()
    assert login(client, password, mechanism) == []
    client.say(commands.Ping())
    client.net.reactor.advance(LOGIN_FAILED_SECONDS / 2)
    assert client.replies() == [] and not client.ended
    client.net.reactor.advance(LOGIN_FAILED_SECONDS)
    assert client.replies()[0][2] == "login_failed"
    assert client.ended and not client.engine.requests and client.session.account is None
    assert len(access.failed) == 1


def test_a_login_above_the_quota_of_connections_is_refused() -> None:
    access = Access()
    access.full = True
    client = Client(hello=False, access=access)
    client.say_hello()
    client.replies()
    assert login(client, "right")[0][2] == "busy"
    assert client.ended and client.session.account is None


def test_authenticate_without_users_or_before_hello_is_refused() -> None:
    client = Client()
    client.say(commands.Authenticate("SCRAM-SHA-256", b""))
    assert client.replies()[0][2] == "not_allowed"
    first = Client(hello=False, access=Access())
    first.say(commands.Authenticate("SCRAM-SHA-256", b""))
    assert first.replies()[0][2] == "bad_request" and first.ended


def test_a_pause_for_a_quota_lasts_as_long_as_the_last_request_asked_for_and_ends_with_the_connection() -> None:
    client = Client()
    quiet = len(client.net.reactor.getDelayedCalls())
    ended: list[tuple[float, bool]] = []
    for seconds in (1.0, 2.0, 3.0):
        client.session.pause_for(seconds, partial(lambda *end: ended.append(end), seconds))
    assert len(client.net.reactor.getDelayedCalls()) == quiet + 1
    client.net.reactor.advance(2.9)
    assert client.connection not in client.net.reactor.readers
    assert not ended
    client.net.reactor.advance(0.2)
    assert client.connection in client.net.reactor.readers
    client.session.pause_for(1_000_000.0, partial(lambda *end: ended.append(end), 4.0))
    client.session.connectionLost(None)
    assert ended == [(1.0, True), (2.0, True), (3.0, True), (4.0, False)]
    assert not any(each.time > 100_000 for each in client.net.reactor.getDelayedCalls())
