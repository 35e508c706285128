"""The words of events: each kind is known to the course and to the topic's format."""

from typing import get_args

from tfmq.dead_letters import model
from tfmq.dead_letters.state_machine import TRANSITIONS
from tfmq.dead_letters.topic_store import EVENT_KINDS


def test_every_kind_has_a_course_and_a_name_in_the_format() -> None:
    kinds = set(get_args(model.Event))
    assert kinds == set(EVENT_KINDS) == {kind for row in TRANSITIONS.values() for kind in row}
    assert len(set(EVENT_KINDS.values())) == len(kinds)


def test_each_says_when_it_happened_first() -> None:
    assert all(kind._fields[0] == "at_ms" for kind in EVENT_KINDS)
