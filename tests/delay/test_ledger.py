"""What is not sure holds back everything behind it, and nothing longer than it must."""

from tfmq.delay.arrivals.pending import Landed, Ledger
from tfmq.delay.memory_window import NOTHING


def landed(ticket: int, end: int, low: int) -> Landed:
    return Landed(ticket, 70 + ticket, end, end, 1, low, low, NOTHING)


def test_the_lowest_due_of_what_is_not_sure_is_the_limit() -> None:
    ledger = Ledger()
    assert ledger.limit is None
    tickets = [ledger.expect(low) for low in (50, 20, 90)]
    assert ledger.limit == 20
    ledger.failed(tickets[1])
    assert ledger.limit == 50
    for number, ticket in enumerate((tickets[0], tickets[2])):
        ledger.land(landed(ticket, 100 * (number + 1), 0))
    assert ledger.limit == 50, "written is not sure"
    assert [each.end_offset for each in ledger.forced(100)] == [100]
    assert ledger.limit == 90
    assert ledger.written is not None and ledger.written.end_offset == 200
    assert [each.end_offset for each in ledger.forced(10_000)] == [200]
    assert (ledger.limit, len(ledger)) == (None, 0)


def test_a_ticket_that_failed_twice_is_no_matter() -> None:
    ledger = Ledger()
    ticket = ledger.expect(5)
    ledger.failed(ticket)
    ledger.failed(ticket)
    assert ledger.limit is None


def test_what_a_stopped_log_may_have_holds_back_its_own_targets_only() -> None:
    ledger = Ledger()
    one, other = ledger.expect(50), ledger.expect(90)
    ledger.land(landed(one, 100, 50))
    ledger.give_up()
    assert (ledger.limit, ledger.lowest, ledger.doubtful) == (90, 50, {71: 50})
    ledger.failed(other)
    assert (ledger.limit, ledger.lowest) == (None, 50)
