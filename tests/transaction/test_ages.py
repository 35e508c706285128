"""The oldest prepared transaction, whatever comes and goes."""

from tests.scale import seeded
from tfmq.transaction.active_transactions import STALE_ENTRIES_MIN, PreparedByAge


def test_without_any_there_is_no_oldest() -> None:
    assert PreparedByAge().oldest_ms is None


def test_the_oldest_is_by_time_and_not_by_epoch() -> None:
    ages = PreparedByAge()
    ages.add(1, 5000)
    ages.add(2, 3000)
    ages.add(3, 4000)
    assert ages.oldest_ms == 3000
    ages.remove(2)
    assert ages.oldest_ms == 4000
    assert len(ages) == 2
    ages.remove(3)
    ages.remove(3)
    ages.remove(1)
    assert ages.oldest_ms is None


def test_it_agrees_with_a_plain_dict_over_many_changes_and_keeps_no_dead_ones() -> None:
    generator = seeded("ages")
    ages = PreparedByAge()
    plain: dict[int, int] = {}
    for epoch in range(6 * STALE_ENTRIES_MIN):
        ages.add(epoch, plain.setdefault(epoch, generator.randrange(1 << 40)))
        if generator.random() < 0.98:
            gone = generator.choice(list(plain)[:50])
            ages.remove(gone)
            del plain[gone]
        if epoch % 100 == 0:
            assert ages.oldest_ms == min(plain.values(), default=None)
    assert len(ages._heap) <= 2 * len(plain) + STALE_ENTRIES_MIN + 1
