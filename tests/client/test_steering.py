"""What a handler may raise to say what becomes of its message."""

import pickle
from datetime import timedelta
from typing import Any

import pytest

import tfmq
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.client.worker.listeners import Reject, RetryLater
from tfmq.errors import BadRequest


def test_they_are_public_names() -> None:
    assert tfmq.Reject is Reject and tfmq.RetryLater is RetryLater
    assert str(Reject("no such customer")) == Reject("no such customer").reason == "no such customer"


def test_logs_and_letters_show_the_names_that_people_write() -> None:
    for error in (Reject("no"), RetryLater(3600)):
        assert Failure.from_exception(error, 0).error.startswith(f"tfmq.{type(error).__name__}: ")
        assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_a_time_is_seconds_or_a_timedelta() -> None:
    assert RetryLater(0).seconds == 0.0
    assert RetryLater(1.5, "the bank is closed").reason == "the bank is closed"
    assert RetryLater(timedelta(minutes=2)).seconds == 120.0
    assert "120 s" in str(RetryLater(120))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "5", None, timedelta(seconds=-1)])
def test_anything_else_is_said_so(seconds: Any) -> None:
    with pytest.raises(BadRequest, match="RetryLater"):
        RetryLater(seconds)
