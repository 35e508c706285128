"""The login of a client: nothing is sent before it, nobody but the broker completes it, and the password stays inside.

The broker's end is `access.scram.Login`, or somebody in between who changes what it answers.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import tfmq
import tfmq.aio
import tfmq.twisted
from tests import reactor
from tests.client.fake_broker import SWALLOW, FakeBroker, listening
from tests.client.rig import Rig
from tfmq.access.scram import Keys, Login, decoys, make_keys
from tfmq.client.connection.addresses import Credentials
from tfmq.client.connection.connection import ClientConnection, PendingRequest
from tfmq.errors import NOT_DONE, UNKNOWN, Busy, ConnectionFailed, LoginFailed, NotAllowed, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import Authenticate, CreateTopic, Hello, Ping

PASSWORD = "p4ss:w@rd"
IN_ADDRESS = "p4ss%3Aw%40rd"
OTHER = "an-other-one"
LOGIN = [Hello, Authenticate, Authenticate]


def unchanged(data: bytes) -> bytes:
    return data


@dataclass(eq=False)
class UserBroker(FakeBroker):
    """A broker with one user. `first` and `final` change its two answers on the way to the client."""

    password: str = PASSWORD
    features: list[str] = field(default_factory=lambda: ["scram-sha-256"])
    first: Callable[[bytes], bytes] = unchanged
    final: Callable[[bytes], bytes] = unchanged
    done: tuple[bool, bool] = (False, True)

    def __post_init__(self) -> None:
        FakeBroker.__init__(self)
        self.answers: list[bytes] = []
        self.set_password(self.password)

    def set_password(self, password: str) -> None:
        self.keys = make_keys(password, random.Random(1).randbytes, 4096)

    def hello(self, request: Hello) -> Any:
        self.login = Login(self._find, decoys(b"secret"))
        self.steps = iter(((self.first, self.done[0]), (self.final, self.done[1])))
        return super().hello(request)._replace(features=self.features)

    def authenticate(self, request: Authenticate) -> Any:
        assert request.mechanism == "SCRAM-SHA-256"
        (change, done), (answer, _) = next(self.steps), self.login.answer(request.data)
        self.answers.append(answer)
        return commands.AuthenticateReply(change(answer), done)

    def _find(self, name: str) -> Keys | None:
        return self.keys if name == "me" else None

    @property
    def received(self) -> list[type]:
        return [type(each) for each in self.requests]


class LoginRig(Rig):
    """A rig whose driver disconnects after an error, as all drivers do."""

    def __init__(self, broker: UserBroker, credentials: Credentials | None, servers: int = 1) -> None:
        super().__init__(broker, servers)
        self.link.servers = tuple(each._replace(credentials=credentials) for each in self.link.servers)  # type: ignore[union-attr]
        self.lost: list[TfmqError] = []

    def _step(self) -> bool:
        try:
            return super()._step()
        except TfmqError as error:
            self.lost.append(error)
            self.cut(error)
            return True

    def ping(self) -> PendingRequest:
        pending = self.link.send_request(Ping())
        self.exchange()
        return pending


def rig_for(broker: UserBroker, password: str = PASSWORD, servers: int = 1) -> LoginRig:
    return LoginRig(broker, Credentials("me", password), servers)


def refusal(rig: LoginRig) -> str:
    """The sentence of a login that failed for good, at once, after which nothing was sent."""
    pending = rig.ping()
    assert isinstance(pending.error, LoginFailed)
    assert (pending.error.retriable, pending.error.outcome) == (False, NOT_DONE)
    assert rig.broker.received == LOGIN[: len(rig.broker.received)]  # type: ignore[attr-defined]
    assert rig.link.connection_count == 0 and rig.link.hello is None
    return pending.error.sentence


# The login


def test_requests_are_sent_after_the_login_in_their_order() -> None:
    broker = UserBroker()
    rig = rig_for(broker)
    ready: list[int] = []
    rig.link.on_ready.append(lambda link: ready.append(len(broker.requests)))
    pending = [rig.link.send_request(each) for each in (Ping(), CreateTopic("t", 1, {}), Ping())]
    broker.plan(CreateTopic, NotAllowed())
    rig.exchange()
    assert [each.done for each in pending] == [True, True, True]
    assert broker.received == [*LOGIN, Ping, CreateTopic, Ping]
    assert ready == [3] and rig.link.connection_count == 1


def test_each_connection_has_a_login_of_its_own() -> None:
    broker = UserBroker()
    rig = rig_for(broker)
    rig.ping()
    rig.cut()
    assert rig.ping().error is None
    assert broker.received == [*LOGIN, Ping, *LOGIN, Ping]


@pytest.mark.parametrize("name", ["me", "somebody-else"])
def test_a_wrong_login_fails_at_once(name: str) -> None:
    rig = LoginRig(UserBroker(), Credentials(name, OTHER))
    sentence = refusal(rig)
    assert sentence.startswith(f"tfmq://{name}@broker:8367: The broker did not accept the login")
    assert OTHER not in sentence and rig.time == 1000.0 and len(rig.dialled) == 1


def test_a_password_that_none_can_be_is_refused_like_a_wrong_one() -> None:
    assert "control characters" in refusal(rig_for(UserBroker(), "\0"))


def test_a_password_changed_meanwhile_fails_requests_without_a_hot_loop() -> None:
    broker = UserBroker()
    rig = rig_for(broker)
    rig.ping()
    broker.set_password(OTHER)
    broker.plan(Ping, SWALLOW)
    sent = rig.ping()
    rig.cut()
    rig.advance(1.0)
    assert isinstance(sent.error, LoginFailed) and sent.error.outcome == UNKNOWN
    dialled = len(rig.dialled)
    rig.advance(60.0)
    assert len(rig.dialled) == dialled  # no request, no attempt
    until, failed = rig.time + 20.0, 0
    while rig.time < until:
        pending = rig.link.send_request(Ping())
        while not pending.done:
            rig.advance(0.05)
        failed += isinstance(pending.error, LoginFailed)
    assert failed >= 5 and len(rig.dialled) - dialled <= 20
    broker.set_password(PASSWORD)
    pending = rig.link.send_request(Ping())
    rig.advance(5.0)
    assert pending.error is None


def test_the_time_for_hello_is_for_the_login_too() -> None:
    broker = UserBroker()
    broker.plan(Authenticate, SWALLOW)
    rig = rig_for(broker)
    rig.ping()
    rig.advance(9.9)
    assert not rig.lost
    rig.advance(0.2)
    assert isinstance(rig.lost[0], ConnectionFailed) and "did not complete the login in 10 s" in rig.lost[0].sentence
    rig.advance(1.0)
    assert rig.ping().error is None


def test_a_busy_broker_is_asked_again_after_the_time_that_it_names() -> None:
    broker = UserBroker()
    broker.plan(Authenticate, Busy(wait_ms=5000))
    rig = rig_for(broker)
    rig.ping()
    rig.link.first_connect_timeout = 60.0
    rig.advance(4.9)
    assert len(rig.dialled) == 1
    rig.advance(0.2)
    assert len(rig.dialled) == 2 and rig.link.connection_count == 1


# Addresses of one broker


def test_the_wrong_password_is_reported_although_another_address_does_not_answer() -> None:
    rig = rig_for(UserBroker(), OTHER, servers=2)
    rig.link.send_request(Ping())

    def refuse(link: Any = None) -> None:
        rig.reachable = False

    rig.broker.first = lambda data: refuse() or data  # type: ignore[attr-defined, func-returns-value]
    rig.exchange()
    assert [each.port for each in rig.dialled] == [8367, 8368]
    assert isinstance(rig.link.last_error, LoginFailed) and not rig.link.has_pending_requests


def test_the_next_address_is_tried_after_a_failed_login() -> None:
    broker = UserBroker()
    rig = rig_for(broker, servers=2)
    broker.plan(Authenticate, LoginFailed())
    assert rig.ping().error is None and len(rig.dialled) == 2


# Who is no broker, or is in between


def false_proof(answer: bytes) -> bytes:
    return b"v=" + base64.b64encode(b"\0" * 32)


def iterations(count: str) -> Callable[[bytes], bytes]:
    return lambda answer: answer.rpartition(b"i=")[0] + b"i=" + count.encode()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"final": false_proof}, "could not prove that it knows this user"),
        ({"final": lambda answer: b"e=other-error"}, "could not prove"),
        ({"final": lambda answer: b""}, "could not prove"),
        ({"final": lambda answer: b"\xff"}, "none of SCRAM-SHA-256"),
        ({"first": iterations("4095")}, "iterations are wrong"),
        ({"first": iterations("1000001")}, "iterations are wrong"),
        ({"first": iterations("-1")}, "iterations are wrong"),
        ({"first": iterations("4096,i=1")}, "iterations are wrong"),
        ({"first": lambda answer: b"r=x" + answer[2:]}, "none of SCRAM-SHA-256"),
        ({"first": lambda answer: answer.replace(b"s=", b"s=!")}, "none of SCRAM-SHA-256"),
        ({"first": lambda answer: b"e=unknown-user,i=4096"}, "none of SCRAM-SHA-256"),
        ({"done": (True, True)}, "before the client had proved"),
        ({"first": false_proof, "done": (True, True)}, "before the client had proved"),
        ({"features": []}, "asks for no login, but the address has a user"),
        ({"features": ["scram-sha-1", "plain", "SCRAM-SHA-256-PLUS"]}, "asks for no login"),
    ],
)
def test_who_does_not_prove_to_be_the_broker_gets_no_request(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(rig_for(UserBroker(**changes)))


def test_answers_that_were_recorded_are_useless() -> None:
    seen = UserBroker()
    rig_for(seen).ping()
    first, final = seen.answers
    assert "none of SCRAM-SHA-256" in refusal(rig_for(UserBroker(first=lambda answer: first)))
    assert "could not prove" in refusal(rig_for(UserBroker(final=lambda answer: final)))


def test_a_broker_that_goes_on_after_the_login_is_none() -> None:
    rig = rig_for(UserBroker(done=(False, False)))
    rig.ping()
    assert "goes on with the login after its end" in str(rig.link.last_error) and not rig.link.connection_count


# No user in the address


def test_without_a_user_the_address_to_write_is_named() -> None:
    rig = LoginRig(UserBroker(), None)
    assert "broker:8367 wants a login: write tfmq://USER@broker:8367" in refusal(rig)


def test_without_a_user_nothing_changes_for_a_broker_without_users() -> None:
    rig = LoginRig(UserBroker(features=[]), None)
    assert rig.ping().error is None and rig.broker.received == [Hello, Ping]  # type: ignore[attr-defined]


# Every driver, on real sockets, and what is written about it


def blocking(servers: str) -> str:
    with tfmq.Admin(servers) as client:
        client.topics()
    return repr(client)


def asynchronous(servers: str) -> str:
    async def story() -> str:
        async with tfmq.aio.Admin(servers) as client:
            await client.topics()
        return repr(client)

    return asyncio.run(story())


def in_a_reactor(servers: str) -> str:
    async def story(running: Any) -> str:
        client = tfmq.twisted.Admin(servers, reactor=running)
        try:
            await client.topics()
        finally:
            await client.close()
        return repr(client)

    shown: str = reactor.play(story)
    return shown


@pytest.mark.parametrize("client", [blocking, asynchronous, in_a_reactor])
def test_every_driver_logs_in_and_shows_no_password(
    client: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setitem(ClientConnection.__init__.__kwdefaults__, "first_connect_timeout", 60.0)
    broker = UserBroker()
    with listening(broker) as address:
        shown = client(f"tfmq://me:{IN_ADDRESS}@{address}")
        assert f"tfmq://me@{address}" in shown
        begun = time.monotonic()
        with pytest.raises(LoginFailed) as caught:
            client(f"tfmq://me:{OTHER}@{address}")
        assert time.monotonic() - begun < 30.0  # not after the time for the first connection
    written = "".join((shown, caplog.text, *capfd.readouterr(), repr(caught.value), str(caught.getrepr(style="long"))))
    for secret in (PASSWORD, IN_ADDRESS):
        assert secret not in written
    assert OTHER not in shown + caplog.text + str(caught.value) + repr(caught.value)
