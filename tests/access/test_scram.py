"""Logins by SCRAM-SHA-256: who knows the password logs in, and everybody else gets the same refusal."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
import scramp.core

from tfmq.access.scram import ClientLogin, Keys, Login, decoys, is_password, make_keys
from tfmq.errors import BadRequest, LoginFailed

KEYS = make_keys("correct horse", lambda size: bytes(range(size)), iterations=4096)
DECOY = decoys(b"secret")


def login() -> Login:
    return Login({"ann": KEYS}.get, DECOY)


def run(broker: Login, client: ClientLogin) -> None:
    answer, done = broker.answer(client.first())
    assert not done and not broker.is_over
    answer, done = broker.answer(client.final(answer))
    assert done and broker.is_over
    client.check(answer)


def test_the_vectors_of_rfc_7677() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    keys = make_keys("pencil", lambda size: salt, iterations=4096)
    assert base64.b64encode(keys.stored_key) == b"WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY="
    assert base64.b64encode(keys.server_key) == b"wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="


@pytest.mark.parametrize("password", ["correct horse", "pass:word@host%41", "Grüße, 世界", "x" * 500])
def test_the_right_password_logs_in(password: str) -> None:
    keys = make_keys(password, bytes, iterations=4096)
    broker = Login({"ann": keys}.get, DECOY)
    run(broker, ClientLogin("ann", password))
    assert broker.name == "ann"


def refusal(broker: Login, *messages: bytes) -> str:
    with pytest.raises(LoginFailed) as found:
        for message in messages:
            broker.answer(message)
    assert broker.is_over
    return found.value.sentence


def test_a_wrong_password_and_an_unknown_user_get_the_same_refusal() -> None:
    sentences = set()
    for name, password in (("ann", "wrong"), ("nobody", "correct horse")):
        broker, client = login(), ClientLogin(name, password)
        answer, _ = broker.answer(client.first())
        sentences.add(refusal(broker, client.final(answer)))
    assert len(sentences) == 1


def test_an_unknown_user_has_a_salt_that_stays_the_same() -> None:
    def salt(name: str) -> str:
        return login().answer(ClientLogin(name, "x").first())[0].decode().split(",")[1]

    assert salt("nobody") == salt("nobody") != salt("another")


def test_a_recorded_proof_is_useless_later() -> None:
    broker, client = login(), ClientLogin("ann", "correct horse")
    first = client.first()
    answer, _ = broker.answer(first)
    final = client.final(answer)
    broker.answer(final)
    again = login()
    again.answer(first)  # the broker has another nonce
    refusal(again, final)
    refusal(broker, final)  # a third message of the same login


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"\xff\xfe"],
        [b"n,,"],
        [b"n,,n=ann"],
        [b"y,,n=ann,r="],
        [b"p=tls-unique,,n=ann,r=abc"],
        [b"n,,m=ext,n=ann,r=abc"],
        [b"n,,n=ann,r=abc", b"c=biws,r=abc,p=AAAA"],
        [b"n,,n=ann,r=abc", b"c=biws"],
        [b"n,,n=ann,r=abc", b"n,,n=ann,r=abc"],
        [b"n,,n=" + b"=" * 4000 + b",r=abc"],
    ],
)
def test_malformed_messages_are_refused(messages: list[bytes]) -> None:
    refusal(login(), *messages)


def test_a_broker_that_does_not_know_the_keys_is_noticed() -> None:
    impostor = Login({"ann": KEYS._replace(server_key=bytes(32))}.get, DECOY)
    with pytest.raises(LoginFailed, match="could not prove"):
        run(impostor, ClientLogin("ann", "correct horse"))


@pytest.mark.parametrize("change", [lambda text: text.replace("i=4096", "i=1"), lambda text: text[:-4] + "i=9999999"])
def test_a_client_does_neither_too_little_work_nor_too_much(change: Callable[[str], str]) -> None:
    client = ClientLogin("ann", "correct horse")
    answer, _ = login().answer(client.first())
    with pytest.raises(LoginFailed, match="iterations"):
        client.final(change(answer.decode()).encode())


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = scramp.core.compare_digest
    monkeypatch.setattr(scramp.core, "compare_digest", lambda *pair: compared.append(pair) or compare(*pair))
    broker, client = login(), ClientLogin("ann", "wrong")
    answer, _ = broker.answer(client.first())
    refusal(broker, client.final(answer))
    assert any(KEYS.stored_key in pair for pair in compared)


def test_a_password_is_checked_against_its_keys() -> None:
    assert is_password(KEYS, "correct horse")
    assert not is_password(KEYS, "wrong") and not is_password(DECOY("ann"), "correct horse")
    assert not is_password(KEYS, "\0")


@pytest.mark.parametrize(
    "keys",
    [
        KEYS._replace(salt=b""),
        KEYS._replace(stored_key=b"short"),
        KEYS._replace(server_key=b""),
        KEYS._replace(iterations=4095),
        KEYS._replace(iterations=1_000_001),
    ],
)
def test_keys_that_are_none_are_refused(keys: Keys) -> None:
    with pytest.raises(BadRequest, match="of ann"):
        keys.checked("ann")
