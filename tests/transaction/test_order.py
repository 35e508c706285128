"""Epochs in order, a page at a time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq.transaction.transaction_table import REMOVED_EPOCHS_MIN, EpochIndex


@given(st.integers(0, 1 << 32))
def test_any_page_is_what_sorting_would_give(seed: int) -> None:
    generator = random.Random(seed)
    live: dict[int, None] = {}
    order = EpochIndex(live)
    epoch = 0
    for _ in range(generator.randrange(600)):
        if live and generator.random() < 0.45:
            del live[generator.choice(list(live))]
            order.count_removed()
        else:
            epoch += generator.randrange(1, 4)
            late = epoch - generator.randrange(1, 3)
            new = (
                late if generator.random() < 0.1 and late not in live and late not in order._epochs else epoch
            )
            if new not in live:
                live[new] = None
                order.add_epoch(new)
        after = generator.randrange(epoch + 2)
        assert list(order.epochs_after(after)) == sorted(each for each in live if each > after), (
            f"seed {seed}"
        )


def test_what_is_gone_takes_no_room() -> None:
    live: dict[int, None] = {}
    order = EpochIndex(live)
    for epoch in range(1, scaled(100_000) + 1000):
        live[epoch] = None
        order.add_epoch(epoch)
        if epoch > 10:
            del live[epoch - 10]
            order.count_removed()
        assert len(order._epochs) <= 2 * (len(live) + REMOVED_EPOCHS_MIN)


def test_a_page_does_not_look_at_those_before_it() -> None:
    """Item 28: 100,000 in doubt are listed in pages, none of which walks over the others."""
    looked: list[int] = []

    class Live(dict[int, None]):
        def __contains__(self, epoch: object) -> bool:
            assert isinstance(epoch, int)
            looked.append(epoch)
            return super().__contains__(epoch)

    live = Live.fromkeys(range(1, 100_001))
    order = EpochIndex(live)
    for epoch in live:
        order.add_epoch(epoch)
    looked.clear()
    page = [epoch for epoch, _ in zip(order.epochs_after(70_000), range(100), strict=False)]
    assert page == list(range(70_001, 70_101))
    assert len(looked) <= 101 and min(looked) == 70_001


def test_it_may_change_while_a_page_is_read() -> None:
    live = dict.fromkeys(range(1, 1000))
    order = EpochIndex(live)
    for epoch in live:
        order.add_epoch(epoch)
    seen = []
    for epoch in order.epochs_after(0):
        seen.append(epoch)
        if epoch + 1 in live:
            del live[epoch + 1]
            order.count_removed()
    assert seen == list(range(1, 1000, 2))
