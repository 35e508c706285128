"""A member: how long it has, which number it goes by, what its wishes weigh."""

import pytest

from tests.broker.helpers import Session
from tfmq.broker.groups.group import Member, Wishes


def member(**fields: float) -> Member:
    made = Member("ada", 5, 30_000, 100.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_member_has_its_session_time_from_when_it_was_last_heard_of() -> None:
    ada = member()
    assert ada.deadline() == 130.0
    ada.attach(Session(), 110.0)
    assert ada.deadline() == 140.0


def test_without_its_connection_it_has_a_tenth_of_that_and_never_more_than_before() -> None:
    ada = member()
    ada.attach(Session(), 110.0)
    ada.detach(112.0)
    assert ada.session is None and ada.deadline() == pytest.approx(115.0)
    ada.attach(Session(), 120.0)
    ada.detach(149.0)
    assert ada.deadline() == 150.0
    ada.attach(Session(), 149.5)
    assert ada.deadline() == 179.5


def test_it_goes_by_its_join_or_its_last_grant() -> None:
    ada = member()
    assert ada.generation == 5
    ada.owned = {(16, 0): 9, (16, 1): 7}
    assert ada.generation == 9


def test_wishes_are_compared_as_sets_and_weigh_what_they_name() -> None:
    wishes = Wishes(["b", "a"], "sticky", [("a", 0)])
    assert wishes == Wishes(["a", "b", "a"], "sticky", {("a", 0)}) and hash(wishes) == hash(wishes)
    assert wishes.size == 4 and Wishes([], "range", None).size == 1
    for other in (Wishes(["a"], "sticky", [("a", 0)]), Wishes(["a", "b"], "range", [("a", 0)])):
        assert wishes != other
    assert wishes != Wishes(["a", "b"], "sticky", None)
    ada = member()
    assert ada.candidate is None
    ada.wishes = wishes
    assert ada.candidate is not None and ada.candidate.takes(("a", 0)) and not ada.candidate.takes(("b", 0))
