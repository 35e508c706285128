"""A standby sends clients to the primary, and answers only what a standby can answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.test_session import Client, produce
from tfmq.access.rights import RULES
from tfmq.errors import Busy, Forbidden
from tfmq.protocol import commands
from tfmq.protocol.commands import COMMANDS, Command
from tfmq.replication.errors import StoreUnavailable
from tfmq.server.standby_handler import Promote, StandbyHandler

ELSEWHERE = (commands.Hello, commands.Authenticate, commands.Status)
"""Answered by the session."""


class Access:
    """Refuses what needs a right."""

    def check(self, request: Any, reply: Any, session: Any) -> bool:
        if RULES[type(request)](request):
            reply.error(Forbidden("no right"))
            return False
        return True


def standby(
    promote: Promote = lambda done: done(None), primary: str = "10.0.0.1:8367", access: Any = None
) -> tuple[Client, StandbyHandler]:
    handler = StandbyHandler(lambda: primary, promote, lambda: 1234, access)
    client = Client(handle=handler.handle, hello_properties=handler.hello_properties)
    return client, handler


def reply_to(client: Client, request: Any) -> list[Any]:
    client.say(request)
    (reply,) = client.replies()
    return reply


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.request.shape not in ELSEWHERE], ids=repr)
def test_every_other_request_is_answered_with_the_address_of_the_primary(command: Command) -> None:
    handler = StandbyHandler(lambda: "10.0.0.1:8367", lambda done: done(None), lambda: 1234)
    answered: list[Any] = []

    class Reply:
        ok = staticmethod(lambda *fields, **body: answered.append(("ok", *fields)))
        error = staticmethod(lambda error: answered.append((error.code, error.primary, error.outcome)))

    request = tuple.__new__(command.request.shape, [None] * len(command.request.names))
    handler.handle(request, b"", Reply(), Client().session)  # type: ignore[arg-type]
    if command.request.shape is commands.Ping:
        assert answered == [("ok", 1234)]
    elif command.request.shape is commands.PromoteReplica:
        assert answered == [("ok", "requested")]
    else:
        assert answered == [("not_primary", "10.0.0.1:8367", "not done")]


def test_hello_says_the_role_and_where_the_primary_is() -> None:
    handler = StandbyHandler(lambda: "10.0.0.1:8367", lambda done: done(None), lambda: 1234)
    client = Client(hello=False, handle=handler.handle, hello_properties=handler.hello_properties)
    client.say_hello()
    assert client.replies()[0][-1] == {"role": "standby", "primary": "10.0.0.1:8367"}
    reading = StandbyHandler(lambda: "", lambda done: None, lambda: 0, reads=object())  # type: ignore[arg-type]
    assert reading.hello_properties() == {"role": "standby", "primary": "", "reads": True}


def test_the_connection_stays_and_a_send_without_an_answer_gets_none() -> None:
    client, _ = standby()
    assert reply_to(client, produce())[2] == "not_primary"
    client.say(produce(acks=0))
    assert client.replies() == [] and not client.ended
    assert reply_to(client, commands.Status())[2] == {"topics": 3, "connections": 1}


def test_without_a_known_primary_the_answer_says_so() -> None:
    client, _ = standby(primary="")
    _, _, code, outcome, sentence, details = reply_to(client, produce())
    assert (code, outcome, details) == ("not_primary", "not done", {"primary": ""})
    assert "No server is known to be primary" in sentence


def test_a_promotion_is_answered_when_it_is_requested_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tfmq.audit")
    asked: list[Callable[[BaseException | None], None]] = []
    client, _ = standby(asked.append)
    client.say(commands.PromoteReplica())
    assert client.replies() == []
    asked[0](None)
    assert client.replies()[0][2] == "requested"
    assert caplog.messages == ["promote this server to primary, asked by test at 127.0.0.1:50000: requested"]


@pytest.mark.parametrize("raised", [True, False])
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(StoreUnavailable("no answer."), "store_failed", "replicas: no answer."), (Busy("later"), "busy", "later")],
)
def test_a_promotion_that_cannot_be_requested_is_an_error(
    error: Exception, code: str, words: str, raised: bool
) -> None:
    def promote(done: Callable[[BaseException | None], None]) -> None:
        if raised:
            raise error
        done(error)

    reply = reply_to(standby(promote)[0], commands.PromoteReplica())
    assert reply[2] == code and words in reply[4]


def test_only_a_user_with_the_right_may_promote() -> None:
    client, _ = standby(lambda done: pytest.fail("it was requested"), access=Access())
    assert reply_to(client, commands.PromoteReplica())[2] == "forbidden"
    assert reply_to(client, produce())[2] == "not_primary"


@pytest.mark.parametrize(
    ("features", "durability"), [(["replicated"], 3), ([], 2), ("replicated", 2), (None, 2), ([["replicated"]], 2)]
)
def test_only_a_client_that_knows_the_durability_of_replicas_is_sent_it(features: Any, durability: int) -> None:
    client = Client(hello=False, synced_durability=3, hello_properties=lambda: {"role": "primary"})
    client.say_hello(details={} if features is None else {"features": features})
    properties = client.replies()[0][-1]
    assert client.session.synced_durability == durability
    assert properties == {"role": "primary", **({"durability": 3} if durability == 3 else {})}


def test_a_server_without_replicas_says_nothing_of_them() -> None:
    client = Client(hello=False)
    client.say_hello(details={"features": ["replicated"]})
    assert client.replies()[0][-1] == {} and client.session.synced_durability == 2
