"""An effect is a value: where to, what, from which place of which source."""

from journal.record.batch import Batch, Source
from journal.record.format import make_log_id as log_id
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    AppendDelayed,
    AppendResult,
    CommitOffsets,
    GroupPositions,
)
from tfmq.broker.catalog_state import ID_FIRST

SOURCE = Source(2, 7, 100, 1)


def test_an_append_names_its_target_and_its_source() -> None:
    effect = Append("orders", 16, 0, [Batch(b"", (), 1, 0, 0)], SOURCE)
    assert (effect.topic, effect.incarnation, effect.partition, effect.source) == ("orders", 16, 0, SOURCE)
    assert effect == Append("orders", 16, 0, [Batch(b"", (), 1, 0, 0)], SOURCE)


def test_the_key_of_an_append_is_the_id_of_its_log() -> None:
    effect = Append("orders", 16, 3, [], SOURCE)
    assert effect.key == log_id(16, 3)
    assert effect.key != Append("orders", 17, 3, [], SOURCE).key, "another life of the topic is another target"


def test_offsets_have_one_key_that_no_log_has() -> None:
    effect = CommitOffsets([GroupPositions("billing", 4, [(16, 0, 1000, 0, 1)])], SOURCE)
    assert effect.key == OFFSETS_KEY
    assert log_id(1, 0) > OFFSETS_KEY


def test_delayed_messages_arrive_in_one_log_that_no_topic_has() -> None:
    effect = AppendDelayed([Batch(b"", (), 1, 0, 1)], [1000], SOURCE)
    assert effect.key == ARRIVALS_KEY != OFFSETS_KEY
    assert log_id(ID_FIRST, 0) > ARRIVALS_KEY, "topics' incarnations are above the house's own ids"


def test_a_mark_says_up_to_where_its_target_must_be_fsynced() -> None:
    assert AppendResult(log_id(16, 0), 4096, [0, 1200]) == (log_id(16, 0), 4096, [0, 1200], ())
