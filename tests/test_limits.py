"""Limits: each has a reason and a cap it cannot pass; names are what a folder and a log line can bear."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import filenames
from tfmq import limits


@pytest.mark.parametrize("limit", limits.ALL.values(), ids=list(limits.ALL))
def test_each_limit_is_a_number_with_a_reason(limit: limits.Limit) -> None:
    assert 0 < int(limit) <= limit.cap
    assert limit.reason and limit.unit
    assert limits.ALL[limit.name] is limit
    assert limit.configurable == (limit.cap > limit)


def test_a_constant_bears_the_name_of_its_limit() -> None:
    assert {name.lower() for name, value in vars(limits).items() if isinstance(value, limits.Limit)} == set(limits.ALL)


def test_no_first_word_of_text_is_a_size_that_is_allowed() -> None:
    assert int.from_bytes(b"    ", "big") > limits.FRAME_BYTES.cap


def test_a_message_fits_in_a_frame_by_default() -> None:
    assert limits.MESSAGE_BYTES + limits.BLOCK_BYTES + limits.HEADER_BYTES <= limits.FRAME_BYTES


def test_configured_values_replace_defaults_and_only_some_are_reported() -> None:
    every = limits.effective_limits({"frame_bytes": 5})
    assert every["frame_bytes"] == 5 and every["groups"] == limits.GROUPS
    assert limits.limits_to_send({"frame_bytes": 5})["frame_bytes"] == 5
    assert "groups" not in limits.limits_to_send({})


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "...", "x" * 249])
def test_names_that_are_taken(name: str) -> None:
    assert limits.is_valid_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a\n", "x" * 250, "a\0", "../a"])
def test_names_that_are_refused(name: str) -> None:
    assert not limits.is_valid_name(name)


@pytest.mark.long
@given(st.text(max_size=260) | st.from_regex(r"[A-Za-z0-9._-]{0,260}"))
def test_a_name_is_valid_here_exactly_when_it_is_in_the_journal(name: str) -> None:
    assert limits.is_valid_name(name) == filenames.is_valid_name(name)
