"""What may share an append: the source decides, and the room."""

from journal.record.batch import PLAIN, Batch, Source
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_TRANSACTION
from tests.broker.helpers import batch
from tfmq.apply_target import Append
from tfmq.broker.partition import EffectAppend, PendingAppend, StagedAppends, tail_of


def work(kind: int, id: int, high: int, payload: bytes = b"x") -> PendingAppend:
    records = Batch(batch(7, high, [payload]), (), 7, high, 1)
    return EffectAppend(
        Append("orders", 16, 0, [records], Source(kind, id, high, 1)), lambda mark, error: None
    )


def staged(*works: PendingAppend) -> StagedAppends:
    made = StagedAppends()
    for each in works:
        made.add(each, list(each._batches))  # type: ignore[attr-defined]
    return made


def test_an_empty_append_takes_whatever_comes_first_however_large() -> None:
    assert StagedAppends().accepts(work(SOURCE_TRANSACTION, 5, 1, bytes(1000)), 10)


def test_only_effects_of_one_source_share_an_append() -> None:
    one = staged(work(SOURCE_TRANSACTION, 5, 1))
    assert one.accepts(work(SOURCE_TRANSACTION, 5, 2), 1000)
    assert not one.accepts(work(SOURCE_TRANSACTION, 6, 2), 1000)
    assert not one.accepts(work(SOURCE_DELAY, 5, 2), 1000)


def test_an_append_is_bounded() -> None:
    one = staged(work(SOURCE_TRANSACTION, 5, 1, bytes(50)))
    assert one.accepts(work(SOURCE_TRANSACTION, 5, 2, bytes(50)), 140)
    assert not one.accepts(work(SOURCE_TRANSACTION, 5, 2, bytes(50)), 139)


def test_the_last_one_s_place_stands_for_all() -> None:
    both = staged(work(SOURCE_TRANSACTION, 5, 1), work(SOURCE_TRANSACTION, 5, 9))
    assert both.source == Source(SOURCE_TRANSACTION, 5, 9, 1) != PLAIN


def test_the_end_of_a_batch_is_kept_for_the_seam() -> None:
    records = Batch(batch(7, 0, [b"0123456789" * 4]), (), 7, 0, 1)
    assert tail_of(records) == b"0123456789" * 2
    assert staged(work(SOURCE_TRANSACTION, 5, 1, b"y" * 40)).tail == b"y" * 20
