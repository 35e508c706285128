"""What is known of a live transaction begins empty."""

from tfmq.transaction.active_transactions import Live


def test_a_new_one_has_nothing_set_aside_and_nobody_waiting() -> None:
    live = Live(60_000)
    assert (live.timeout_ms, live.place, live.reserved, live.sending) == (60_000, 0, 0, 0)
    assert not (live.sizes or live.missing or live.orphan or live.waiting)
    assert live.course is None


def test_two_share_nothing() -> None:
    first, second = Live(), Live()
    first.sizes[1] = 5
    first.waiting.append(lambda: None)
    assert not second.sizes and not second.waiting
