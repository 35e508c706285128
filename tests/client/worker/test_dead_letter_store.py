"""A failure as it is kept: one line for the error, the end of the traceback, always something that can be stored."""

import ast

from tfmq.client.worker.dead_letter_store import ERROR_CHARACTERS, TRACEBACK_CHARACTERS, Failure


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_failure_names_error_place_and_time() -> None:
    failure = Failure.from_exception(raised(ValueError("no such\norder")), 1234)
    assert (failure.at_ms, failure.error) == (1234, "ValueError: no such order")
    assert "in raised" in failure.traceback and failure.traceback.endswith("ValueError: no such\norder\n")


def test_what_was_after_it_is_reported_too() -> None:
    try:
        try:
            raise KeyError("42")
        except KeyError as error:
            raise ValueError("no such order") from error
    except ValueError as error:
        assert "KeyError: '42'" in Failure.from_exception(error, 0).traceback


def test_it_is_bounded() -> None:
    failure = Failure.from_exception(raised(ValueError("x" * 100_000)), 0)
    assert len(failure.error) == ERROR_CHARACTERS
    assert len(failure.traceback) == TRACEBACK_CHARACTERS


def test_an_error_that_cannot_be_printed_is_a_failure_all_the_same() -> None:
    class Mean(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not today")

    assert "Mean" in Failure.from_exception(raised(Mean()), 0).error
    failure = Failure.from_exception(raised(ValueError("half \udc80")), 0)
    assert failure.error.encode() and failure.traceback.encode()


def test_of_a_payload_that_cannot_be_parsed_the_sentence_has_nothing() -> None:
    try:
        ast.literal_eval("{'card': 4711 4712}")
    except SyntaxError as error:
        failure = Failure.from_exception(error, 0)
    assert failure.error.startswith("SyntaxError: "), "what is in front of the colon is logged"
    assert "4711" not in failure.error
    assert "4711" in failure.traceback
