"""What is not durable holds back everything after it, and nothing longer than it must."""

from tfmq.delay.arrivals.non_durable import NonDurableArrivals, WrittenArrival
from tfmq.delay.memory_window import NO_WHEEL_ROWS


def arrival(ticket: int, end: int, low: int) -> WrittenArrival:
    return WrittenArrival(ticket, 70 + ticket, end, end, 1, low, low, NO_WHEEL_ROWS)


def test_the_lowest_due_of_what_is_not_sure_is_the_limit() -> None:
    ledger = NonDurableArrivals()
    assert ledger.due_limit is None
    tickets = [ledger.begin_append(low) for low in (50, 20, 90)]
    assert ledger.due_limit == 20
    ledger.append_failed(tickets[1])
    assert ledger.due_limit == 50
    for number, ticket in enumerate((tickets[0], tickets[2])):
        ledger.add_written(arrival(ticket, 100 * (number + 1), 0))
    assert ledger.due_limit == 50, "written is not sure"
    assert [each.end_offset for each in ledger.pop_durable(100)] == [100]
    assert ledger.due_limit == 90
    assert ledger.last_written is not None and ledger.last_written.end_offset == 200
    assert [each.end_offset for each in ledger.pop_durable(10_000)] == [200]
    assert (ledger.due_limit, len(ledger)) == (None, 0)


def test_a_ticket_that_failed_twice_is_no_matter() -> None:
    ledger = NonDurableArrivals()
    ticket = ledger.begin_append(5)
    ledger.append_failed(ticket)
    ledger.append_failed(ticket)
    assert ledger.due_limit is None


def test_what_a_stopped_log_may_have_holds_back_its_own_targets_only() -> None:
    ledger = NonDurableArrivals()
    one, other = ledger.begin_append(50), ledger.begin_append(90)
    ledger.add_written(arrival(one, 100, 50))
    ledger.log_stopped()
    assert (ledger.due_limit, ledger.lowest_due, ledger.uncertain_targets) == (90, 50, {71: 50})
    ledger.append_failed(other)
    assert (ledger.due_limit, ledger.lowest_due) == (None, 50)
