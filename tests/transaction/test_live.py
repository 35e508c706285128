"""What is known of a live transaction begins empty."""

from tfmq.transaction.active_transactions import TransactionRuntimeState


def test_a_new_one_has_nothing_set_aside_and_nobody_waiting() -> None:
    live = TransactionRuntimeState(60_000)
    assert (live.timeout_ms, live.lsn, live.reserved_bytes, live.queued_batches) == (60_000, 0, 0, 0)
    assert not (live.target_bytes or live.missing_batches or live.orphaned or live.waiting_commands)
    assert live.apply_progress is None


def test_two_share_nothing() -> None:
    first, second = TransactionRuntimeState(), TransactionRuntimeState()
    first.target_bytes[1] = 5
    first.waiting_commands.append(lambda: None)
    assert not second.target_bytes and not second.waiting_commands
