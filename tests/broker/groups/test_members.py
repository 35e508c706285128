"""A member: how long it has, which number it goes by, what its wishes weigh."""

import pytest

from tests.broker.groups.test_group import subscription
from tests.broker.helpers import Session
from tfmq.broker.groups.members import Member


def member(**fields: float) -> Member:
    made = Member("ada", 5, 30_000, 100.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_member_has_its_session_time_from_when_it_was_last_heard_of() -> None:
    ada = member()
    assert ada.expires_at() == 130.0
    ada.connected(Session(), 110.0)
    assert ada.expires_at() == 140.0


def test_without_its_connection_it_has_a_tenth_of_that_and_never_more_than_before() -> None:
    ada = member()
    ada.connected(Session(), 110.0)
    ada.disconnected(112.0)
    assert ada.session is None and ada.expires_at() == pytest.approx(115.0)
    ada.connected(Session(), 120.0)
    ada.disconnected(149.0)
    assert ada.expires_at() == 150.0
    ada.connected(Session(), 149.5)
    assert ada.expires_at() == 179.5


def test_it_goes_by_its_join_or_its_last_grant() -> None:
    ada = member()
    assert ada.generation == 5
    ada.owned = {(16, 0): 9, (16, 1): 7}
    assert ada.generation == 9


def test_wishes_are_compared_as_sets_and_weigh_what_they_name() -> None:
    wishes = subscription(["b", "a"], "sticky", [("a", 0)])
    assert wishes == subscription(["a", "b", "a"], "sticky", {("a", 0)}) and hash(wishes) == hash(wishes)
    assert wishes.name_count == 4 and subscription([], "range", None).name_count == 1
    for other in (subscription(["a"], "sticky", [("a", 0)]), subscription(["a", "b"], "range", [("a", 0)])):
        assert wishes != other
    assert wishes != subscription(["a", "b"], "sticky", None)
