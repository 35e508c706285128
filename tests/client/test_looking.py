"""When a consumer looks for topics: seldom where it would be told, often where nobody tells it."""

import re
from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.client.consumer.assignment import NOTIFIED_REFRESH_SECONDS
from tfmq.protocol import commands as wire

SECONDS = 100


def looks(broker: Broker, script: Script, seconds: float = SECONDS) -> int:
    """How often it asks for the topics while it waits so long for messages, once it reads."""
    script.poll(0.0)
    before = len(broker.sent(wire.Metadata))
    assert script.poll(seconds) == []
    return len(broker.sent(wire.Metadata)) - before


@pytest.mark.parametrize("arguments", [{}, {"group": "g"}, {"topics": None, "partitions": [("orders", 0)]}])
def test_who_waits_for_messages_does_not_ask_what_there_is(arguments: dict[str, Any]) -> None:
    broker = Broker()
    broker.create("orders", 2)
    script = Script(broker, **arguments)
    assert looks(broker, script) == 0
    fetches = NOTIFIED_REFRESH_SECONDS / 30
    assert 1 <= looks(broker, script, NOTIFIED_REFRESH_SECONDS) <= fetches, (
        "at the end of a fetch it cannot know"
    )


@pytest.mark.parametrize(
    "arguments", [{"topics": re.compile("ord.*")}, {"topics": re.compile("ord.*"), "group": "g"}]
)
def test_topics_of_a_pattern_are_looked_for_in_time(arguments: dict[str, Any]) -> None:
    broker = Broker()
    broker.create("orders")
    assert SECONDS / 5 - 2 <= looks(broker, Script(broker, **arguments)) <= SECONDS / 5 + 2


def test_who_asks_the_broker_for_nothing_looks_in_time() -> None:
    """A partition that is paused brings no answers that could tell of new ones."""
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker, fetch_bytes=1, prefetch_bytes=1)
    script.poll(1)
    script.run(script.core.pause("orders", 0))
    broker.topics["orders"][1][0].append(b"y")
    script.pass_time(40)
    assert SECONDS / 5 - 2 <= looks(broker, script) <= SECONDS / 5 + 2


@pytest.mark.parametrize("group", [None, "g"])
def test_a_partition_that_appears_is_read_at_once(group: str | None) -> None:
    broker = Broker()
    broker.create("orders").append(b"old")
    script = Script(broker, group=group)
    assert script.poll() == [b"old"]
    script.pass_time(7)
    broker.grow("orders").append(b"new")
    assert script.poll(20 if group else 1) == [b"new"]


def test_answers_that_are_never_what_is_found_do_not_make_it_look_again_and_again() -> None:
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker)
    script.poll()
    for count in (3, 3, 3):
        script.core.assignment.partition_count_seen("orders", count)
        script.pass_time(1)
    assert len(broker.sent(wire.Metadata)) == 2


def test_a_member_that_names_a_partition_is_given_it_when_it_appears() -> None:
    broker = Broker()
    broker.create("orders")
    script = Script(broker, group="g", partitions=[0, 1], topics="orders")
    script.poll(0.0)
    broker.grow("orders").append(b"new")
    broker.grow("orders").append(b"not asked for")
    assert script.poll(20) == [b"new"]
    assert script.poll(20) == []
