"""The error tree: every class is complete, travels over the wire and through pickle, and keeps what it
carries.
"""

import copy
import pickle

import pytest

from tfmq import errors
from tfmq.errors import BY_CODE, CLASSES, NOT_DONE, UNKNOWN, Detail, TfmqError, from_error_reply, to_error_reply

# A code or number that was published once never means something else: this list only grows.
PUBLISHED = {
    "error": 1,
    "connection_failed": 2,
    "timed_out": 3,
    "bad_request": 4,
    "unknown_topic": 5,
    "unknown_partition": 6,
    "damaged": 7,
    "offset_out_of_range": 8,
    "log_truncated": 9,
    "message_too_large": 10,
    "storage_stopped": 11,
    "disk_full": 12,
    "busy": 13,
    "closed": 14,
    "abandoned": 15,
    "fenced": 16,
    "unknown_producer": 17,
    "sequence_gap": 18,
    "stale_producer": 19,
    "not_allowed": 20,
    "not_supported": 21,
    "unknown_command": 22,
    "decode_failed": 23,
    "delivery_failed": 24,
    "transaction_error": 25,
    "bad_frame": 26,
    "topic_exists": 27,
    "version_mismatch": 28,
    "not_a_record": 29,
    "internal_error": 30,
    "config_error": 31,
    "unknown_transaction": 32,
    "transaction_rolled_back": 33,
    "transaction_committed": 34,
    "heuristic_outcome": 35,
    "transaction_exists": 36,
    "transaction_state": 37,
    "transaction_too_large": 38,
    "stale_epoch": 39,
    "group_stale": 40,
    "group_fenced": 41,
    "group_incomplete": 42,
    "unknown_schedule": 43,
    "store_failed": 44,
    "login_failed": 45,
    "forbidden": 46,
    "not_primary": 47,
}

every_error = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def test_codes_and_numbers_are_as_published() -> None:
    assert {each.code: each.number for each in CLASSES} == PUBLISHED
    assert len(BY_CODE) == len({each.number for each in CLASSES}) == len(CLASSES)


@every_error
def test_each_error_says_what_happened_and_what_to_do(kind: type[TfmqError]) -> None:
    assert kind.happened.endswith(".") and kind.advice.endswith(".")
    assert str(kind()) == f"{kind.happened} {kind.advice}"
    assert kind.outcome in (NOT_DONE, UNKNOWN)
    assert isinstance(kind.retriable, bool)
    for name in ("code", "number", "happened", "advice"):
        assert name in vars(kind), f"{kind.__name__} takes {name} from its parent"


@every_error
def test_each_error_stands_in_the_tree_that_the_module_prints(kind: type[TfmqError]) -> None:
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if kind.__name__ in line.split()]
    assert lines, f"{kind.__name__} is not in the tree"
    depth = sum(issubclass(each, TfmqError) for each in kind.__mro__) - 1
    assert lines[0].count("│") + lines[0].count("└") + lines[0].count("├") == depth or depth == 0


@every_error
def test_each_error_survives_pickle_and_copy(kind: type[TfmqError]) -> None:
    error = kind("What happened.", outcome=UNKNOWN, retriable=True, first=3, words="x")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind and str(twin) == "What happened."
        assert (twin.details, twin.outcome, twin.retriable) == ({"first": 3, "words": "x"}, UNKNOWN, True)


@every_error
def test_each_error_survives_the_wire(kind: type[TfmqError]) -> None:
    error = kind("What happened.", cut=7)
    twin = from_error_reply(*to_error_reply(error))
    assert type(twin) is kind
    assert (twin.number, twin.code, twin.outcome, str(twin), twin.details) == (
        error.number,
        error.code,
        error.outcome,
        "What happened.",
        {"cut": 7},
    )


def test_connection_and_time_errors_are_what_python_calls_them_too() -> None:
    assert issubclass(errors.ConnectionFailed, ConnectionError)
    assert issubclass(errors.TimedOut, TimeoutError)


def test_numbers_that_travel_are_attributes() -> None:
    damaged = from_error_reply(*to_error_reply(errors.Damaged(first=100, next=200)))
    assert isinstance(damaged, errors.Damaged) and (damaged.first, damaged.next) == (100, 200)
    assert errors.OffsetOutOfRange(first=1, end=2).end == 2
    assert errors.LogTruncated(cut=5).cut == 5
    assert errors.StaleProducer(successor=9).successor == 9
    assert errors.NotARecord(offset=11).offset == 11
    assert errors.LogTruncated().cut == -1
    heuristic = from_error_reply(*to_error_reply(errors.HeuristicOutcome(state="heuristic_committed")))
    assert isinstance(heuristic, errors.HeuristicOutcome) and heuristic.state == "heuristic_committed"
    assert errors.HeuristicOutcome().state == "" and errors.HeuristicOutcome(state=3).state == ""
    assert errors.LogTruncated(cut="text").cut == -1


def test_a_code_of_a_newer_server_is_kept() -> None:
    error = from_error_reply(900, "quota_exceeded", "not done", "Too much.", {"limit": 1})
    assert type(error) is TfmqError
    assert (error.number, error.code, error.outcome, str(error)) == (900, "quota_exceeded", "not done", "Too much.")
    assert to_error_reply(error)[:2] == (900, "quota_exceeded")
    assert TfmqError.code == "error", "the class itself is as it was"


def test_an_outcome_that_is_not_understood_is_unknown() -> None:
    assert from_error_reply(4, "bad_request", "perhaps", "", {}).outcome == UNKNOWN


def test_what_is_not_ours_shows_nothing_of_its_inside() -> None:
    wire = to_error_reply(ZeroDivisionError("secret path /home/me"))
    assert wire.code == "internal_error" and "secret" not in wire.sentence and wire.outcome == UNKNOWN


def test_failed_deliveries_are_listed_and_left_out_by_pickle() -> None:
    error = errors.DeliveryFailed("2 failed.", deliveries=[1, 2])
    assert error.deliveries == [1, 2]
    assert pickle.loads(pickle.dumps(error)).deliveries == []


def test_what_may_have_happened_is_never_called_not_done() -> None:
    for kind in (errors.ConnectionFailed, errors.TimedOut, errors.StorageStopped, errors.UnknownProducer):
        assert kind.outcome == UNKNOWN
    assert errors.ServerError.outcome == UNKNOWN
    assert errors.UnknownTransaction.outcome == UNKNOWN, "it may have been committed, and forgotten"


class Sample(TfmqError):
    outcome = NOT_DONE
    happened = "It broke."
    advice = "Mend it."
    place = Detail(-1)
    word = Detail("")


def test_the_tree_and_its_root_are_found_in_one_module() -> None:
    assert errors.TfmqError is TfmqError and errors.NOT_DONE == NOT_DONE


def test_a_sentence_of_ones_own_replaces_that_of_the_class() -> None:
    assert str(Sample()) == "It broke. Mend it."
    assert str(Sample("Disk 3 broke.")) == "Disk 3 broke."


def test_the_place_that_raises_may_know_better_than_the_class() -> None:
    error = Sample(outcome=UNKNOWN, retriable=True)
    assert (error.outcome, error.retriable) == (UNKNOWN, True)
    assert (Sample().outcome, Sample().retriable) == (NOT_DONE, False)


@pytest.mark.parametrize(
    ("given", "place", "word"), [({"place": 7, "word": "x"}, 7, "x"), ({}, -1, ""), ({"place": "x", "word": 7}, -1, "")]
)
def test_details_are_attributes_of_one_type_whatever_travelled(given: dict[str, object], place: int, word: str) -> None:
    error = Sample(**given)  # type: ignore[arg-type]
    assert (error.place, error.word) == (place, word)
    assert isinstance(Sample.place, Detail) and isinstance(Sample.word, Detail)
