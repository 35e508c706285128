"""kazoo's words about its connections: warnings, and each once a minute."""

import logging

from tfmq.zookeeper.connection import REMEMBERED_MESSAGES_MAX, REPEAT_SECONDS, ThrottledLogFilter


class Said:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sparing = ThrottledLogFilter(lambda: self.now)

    def __call__(self, text: str, level: int = logging.WARNING) -> bool:
        return self.sparing.filter(logging.LogRecord("kazoo", level, "", 0, "%s", (text,), None))


def test_the_same_words_are_said_once_a_minute() -> None:
    said = Said()
    assert [said("refused"), said("refused"), said("timed out")] == [True, False, True]
    said.now += REPEAT_SECONDS - 0.1
    assert not said("refused")
    said.now += 0.2
    assert said("refused")


def test_what_is_no_warning_is_not_said() -> None:
    assert not Said()("connecting", logging.INFO)


def test_words_that_are_never_the_same_are_not_kept() -> None:
    said = Said()
    assert all(said(f"number {number}") for number in range(3 * REMEMBERED_MESSAGES_MAX))
    assert len(said.sparing._logged_at) <= REMEMBERED_MESSAGES_MAX
