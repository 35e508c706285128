"""The sentence for a connection that could not be made or broke."""

import pytest

from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.connection import connection_error
from tfmq.errors import BadFrame, Busy, ConnectionFailed

HERE, THERE = BrokerAddress("127.0.0.1", 8367), BrokerAddress("broker.example", 9000)


def test_who_refuses_is_named_with_all_that_were_asked() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    failure = connection_error(refused, THERE, (HERE, THERE), was_connected=False)
    assert isinstance(failure, ConnectionFailed) and failure.__cause__ is refused
    assert failure.sentence.startswith("Nothing listens at 127.0.0.1:8367 or broker.example:9000:")


def test_what_the_broker_said_itself_is_told_as_it_is() -> None:
    said = Busy("The broker is stopping.")
    assert connection_error(said, HERE, (HERE,), was_connected=True) is said


def test_what_cannot_be_read_is_told_with_the_address() -> None:
    failure = connection_error(BadFrame("That is no frame."), HERE, (HERE,), was_connected=True)
    assert isinstance(failure, ConnectionFailed)
    assert failure.sentence == "127.0.0.1:8367: That is no frame."


@pytest.mark.parametrize(
    ("error", "was_connected", "sentence"),
    [
        (ConnectionResetError("reset by peer"), True, "8367 was lost: reset by peer."),
        (OSError("no route"), False, "8367 could not be made: no route."),
        (None, True, "8367 was lost."),
        (EOFError(), True, "8367 was lost."),
    ],
)
def test_else_it_says_whether_there_was_one(
    error: Exception | None, was_connected: bool, sentence: str
) -> None:
    assert connection_error(error, HERE, (HERE,), was_connected).sentence.endswith(sentence)
