"""Handles of delayed messages: what was printed is read again, and a typo is refused, whatever it is."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq.errors import BadRequest
from tfmq.protocol.delayed_handle import (
    HANDLE_LENGTH,
    HANDLE_LETTER,
    Handle,
    Handles,
    decode_due_times,
    encode_due_times,
    format_handle,
    issuer,
    parse_handle,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
identity, moment = st.integers(1, (1 << 64) - 1), st.integers(0, (1 << 63) - 1)
handles = st.builds(Handle, identity, identity, moment, moment)
EXAMPLE = Handle(0x1234_5678_9ABC_DEF0, 5 << 24, 1_763_700_030_000, 41)


@given(handle=handles)
def test_what_was_printed_is_read_again(handle: Handle) -> None:
    text = format_handle(handle)
    assert parse_handle(text) == handle
    assert len(text) == HANDLE_LENGTH and text[0] == HANDLE_LETTER and set(text[1:]) <= set(ALPHABET)


def test_a_handle_looks_the_same_without_end() -> None:
    """People keep handles, in databases and in programs: the text of one never changes its meaning."""
    assert format_handle(EXAMPLE) == "dci2fm6e2xtppaaaaaaaakaaaaaaaaam2us3lumaaaaaaaaaaaauz45wyh4"


def test_every_single_wrong_character_is_refused() -> None:
    text = format_handle(EXAMPLE)
    for place in range(HANDLE_LENGTH):
        for letter in ALPHABET + "0189=-A ä":
            if letter != text[place]:
                with pytest.raises(BadRequest, match="no handle"):
                    parse_handle(text[:place] + letter + text[place + 1 :])


def test_swapped_and_lost_and_doubled_characters_are_refused() -> None:
    text = format_handle(EXAMPLE)
    for place in range(HANDLE_LENGTH - 1):
        swapped = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
        wrongs = [text[:place] + text[place + 1 :], text[: place + 1] + text[place:]]
        for wrong in [*wrongs, *([swapped] if swapped != text else [])]:
            with pytest.raises(BadRequest, match="no handle"):
                parse_handle(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HANDLE_LETTER,
        "order-42",
        "00000000000000ff",
        "d" * HANDLE_LENGTH,
        "d" + "=" * 58,
        "d" + "ß" * 58,
        "d" * 100_000,
    ],
)
def test_what_is_no_handle_at_all_is_refused_in_a_short_sentence(text: str) -> None:
    with pytest.raises(BadRequest, match="no handle") as caught:
        parse_handle(text)
    assert len(str(caught.value)) < 400


def test_capital_letters_and_blanks_around_are_typos_too() -> None:
    text = format_handle(EXAMPLE)
    for wrong in (text.upper(), f" {text}", f"{text}\n", text.replace(text[5], text[5].upper(), 1)):
        if wrong != text:
            with pytest.raises(BadRequest):
                parse_handle(wrong)


@settings(max_examples=scaled(500))
@given(text=st.text(ALPHABET, min_size=HANDLE_LENGTH - 1, max_size=HANDLE_LENGTH - 1))
def test_any_other_text_of_the_right_shape_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_handle(HANDLE_LETTER + text)


@pytest.mark.parametrize(
    "wrong",
    [
        EXAMPLE._replace(store_id=0),
        EXAMPLE._replace(log_id=1 << 64),
        EXAMPLE._replace(due=1 << 63),
        EXAMPLE._replace(number=-1),
    ],
)
def test_numbers_that_no_message_has_are_never_printed(wrong: Handle) -> None:
    with pytest.raises(ValueError, match="cannot be the handle"):
        format_handle(wrong)


def test_handles_of_a_batch_are_those_of_its_messages() -> None:
    many = Handles(7, 9, 100, array("Q", [50, 40, 60]))
    turns = [(50, 100), (40, 101), (60, 102)]
    assert [parse_handle(text) for text in many] == [Handle(7, 9, *turn) for turn in turns]
    assert len(many) == 3 and many[-1] == many[2] and list(many[1:]) == [many[1], many[2]]
    assert many == list(many) and many != "abc" and many[0] in many
    for outside in (3, -4):
        with pytest.raises(IndexError):
            many[outside]
    with pytest.raises(ValueError, match="one piece"):
        many[::2]


def test_a_batch_of_a_quarter_million_costs_eight_bytes_a_message() -> None:
    dues = array("Q", [1 << 40]) * (1 << 18)
    many = Handles(7, 9, 0, dues)
    assert parse_handle(many[-1]).number == (1 << 18) - 1
    assert not hasattr(many, "__dict__")


@given(numbers=st.lists(st.integers(0, (1 << 64) - 1)))
def test_due_times_travel_big_endian(numbers: list[int]) -> None:
    packed = b"".join(number.to_bytes(8, "big") for number in numbers)
    assert list(decode_due_times(packed)) == numbers
    dues = array("Q", numbers)
    assert encode_due_times(dues) == packed and list(dues) == numbers


def test_handles_of_two_brokers_are_distinguished_although_their_stores_count_alike() -> None:
    issuers = {issuer(node, store_id) for node in ("ab" * 16, "cd" * 16) for store_id in range(1, 1000)}
    assert len(issuers) == 2 * 999 and all(0 < each < 1 << 64 for each in issuers)
    assert issuer("ab" * 16, 16) == 0x193B_727D_3182_3496, "for ever"
