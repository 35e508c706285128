"""How much waits, and when the next is due."""

from tests.delay.desk import Desk


def test_what_waits_is_counted_wherever_it_lies() -> None:
    desk = Desk()
    figures = desk.queue._metrics
    assert (figures.pending, figures.next_due) == (0, None)
    sent = desk.send([b"%d" % n for n in range(10)], [10_000 * n * n + 50 for n in range(10)])
    desk.advance(1)
    assert (figures.pending, figures.next_due) == (9, sent[1].due)
    desk.advance(100)
    assert figures.pending == 6
    desk.until(sent[-1].due + 200)
    assert (figures.pending, figures.next_due) == (0, None)


def test_a_send_counts_at_once() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], 100_000)
    assert desk.queue.pending == 2
    assert desk.queue.pending_bytes >= 0
    desk.advance(70)
    assert desk.queue.pending_bytes > 40
