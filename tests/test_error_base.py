"""What each error has in common: the sentence, what the place that raises knows better, the details."""

import pytest

from tfmq import errors
from tfmq.errors import NOT_DONE, UNKNOWN, Detail, TfmqError


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
