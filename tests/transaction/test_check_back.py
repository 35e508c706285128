"""Check-back: the right group is asked, after the right time, with growing pauses, one client after another."""

from itertools import pairwise

from journal.testing import SimulatedClock
from tests.transaction.rig import Answer, Session
from tfmq.broker.timers import Timers
from tfmq.transaction.check_back import QUERIES_PER_REPLY, QUERY_PAUSE_SECONDS_MAX, WAITS_PER_SESSION_MAX, CheckBack
from tfmq.transaction.requests import CheckBackQuery


class Asking:
    """Checks on a clock that tests move."""

    def __init__(self, check_seconds: float = 60, parked_max: int = 100) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.checks = CheckBack(
            self.timers,
            check_seconds=check_seconds,
            waits_max=parked_max,
            make_query=lambda epoch: CheckBackQuery("x", epoch, 0, []),
        )

    def wait(self, group: str = "shop", session: Session | None = None, wait_ms: int = 30_000) -> Answer:
        answer = Answer()
        answer.cancel = self.checks.add_wait(group, wait_ms, session or Session(), answer)  # type: ignore[attr-defined]
        return answer

    def advance(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
        self.clock.advance(max(0.0, end - self.clock.monotonic()))


def epochs(answer: Answer) -> list[int]:
    assert answer.code == "ok"
    return [each.epoch for each in answer.result]


def test_a_group_is_asked_after_the_time_and_not_before() -> None:
    asking = Asking()
    asking.checks.watch_transaction(7, "shop", 0)
    waiting = asking.wait(wait_ms=100_000)
    asking.advance(59)
    assert waiting.code == "waiting"
    asking.advance(1.1)
    assert epochs(waiting) == [7]


def test_one_that_has_been_prepared_for_long_is_due_at_once() -> None:
    asking = Asking()
    asking.checks.watch_transaction(7, "shop", 3600)
    asking.advance(0)
    assert epochs(asking.wait()) == [7]


def test_only_its_own_group_is_asked() -> None:
    asking = Asking()
    asking.checks.watch_transaction(7, "shop", 60)
    other = asking.wait("other")
    asking.advance(0)
    assert other.code == "waiting"


def test_a_wait_ends_empty_after_its_time_or_when_it_is_cancelled() -> None:
    asking = Asking()
    first, second = asking.wait(wait_ms=1000), asking.wait(wait_ms=50_000)
    asking.advance(1)
    assert epochs(first) == []
    second.cancel()
    second.cancel()
    assert epochs(second) == []
    assert asking.checks.wait_count == 0
    assert epochs(asking.wait(wait_ms=0)) == []


def test_pauses_grow_up_to_a_bound() -> None:
    asking = Asking(check_seconds=60)
    asking.checks.watch_transaction(7, "shop", 60)
    asking.advance(0)
    reported = []
    for _ in range(12):
        answer = asking.wait(wait_ms=10_000_000)
        while answer.code == "waiting":
            asking.advance(30)
        reported.append(asking.clock.monotonic())
    gaps = [round(later - earlier) for earlier, later in pairwise(reported)]
    assert gaps[:5] == [60, 120, 240, 480, 960]
    assert max(gaps) == QUERY_PAUSE_SECONDS_MAX
    assert asking.checks.query_history(7)[0] == len(reported)


def test_clients_of_a_group_take_turns() -> None:
    asking = Asking(check_seconds=10)
    asking.checks.watch_transaction(7, "shop", 10)
    clients = [Session("a"), Session("b"), Session("c")]
    for client in clients:
        asking.wait(session=client, wait_ms=10_000_000)
    asked = []
    for _ in range(6):
        count = asking.checks.query_history(7)[0]
        while asking.checks.query_history(7)[0] == count:
            asking.advance(5)
        asked.append(asking.checks.query_history(7)[1])
        asking.wait(session=next(each for each in clients if each.identity == asked[-1]), wait_ms=10_000_000)
    assert asked == ["a", "b", "c", "a", "b", "c"]


def test_what_ended_is_not_asked_about() -> None:
    asking = Asking()
    asking.checks.watch_transaction(7, "shop", 60)
    asking.checks.watch_transaction(8, "shop", 60)
    asking.advance(0)
    asking.checks.unwatch_transaction(7)
    asking.checks.unwatch_transaction(7)
    assert epochs(asking.wait()) == [8]
    asking.checks.watch_transaction(9, "shop", 0)
    asking.checks.unwatch_transaction(9)
    asking.checks.unwatch_transaction(8)
    waiting = asking.wait(wait_ms=10_000_000)
    asking.advance(5000)
    assert waiting.code == "waiting"


def test_a_pile_is_shared_between_clients() -> None:
    asking = Asking()
    for epoch in range(QUERIES_PER_REPLY + 5):
        asking.checks.watch_transaction(epoch, "shop", 60)
    asking.advance(0)
    first, second = epochs(asking.wait()), epochs(asking.wait())
    assert (len(first), len(second)) == (QUERIES_PER_REPLY, 5)
    assert not set(first) & set(second)


def test_a_lost_client_is_not_asked_and_gets_no_answer() -> None:
    asking, lost = Asking(), Session()
    waiting = asking.wait(session=lost)
    asking.checks.session_lost(lost)
    asking.checks.watch_transaction(7, "shop", 60)
    asking.advance(100)
    assert waiting.code == "waiting"
    assert asking.checks.wait_count == 0
    assert asking.checks.query_history(7)[0] == 0
    assert epochs(asking.wait()) == [7]


def test_too_many_clients_are_refused() -> None:
    asking = Asking(parked_max=2)
    first, second, third = asking.wait(), asking.wait(), asking.wait()
    assert (first.code, second.code, third.code) == ("waiting", "waiting", "busy")
    assert "limits.checks_parked" in str(third.failure)


def test_closing_ends_every_wait_and_sends_no_request() -> None:
    asking = Asking()
    asking.checks.watch_transaction(7, "shop", 0)
    waiting = asking.wait(wait_ms=1_000_000)
    asking.checks.close()
    assert epochs(waiting) == []
    assert asking.timers.next_due() is None


def test_one_client_cannot_take_every_place_to_wait() -> None:
    asking = Asking(parked_max=10 * WAITS_PER_SESSION_MAX)
    greedy = Session()
    answers = [asking.wait(f"group-{number}", greedy) for number in range(WAITS_PER_SESSION_MAX + 1)]
    assert [answer.code for answer in answers[-2:]] == ["waiting", "busy"]
    assert asking.wait().code == "waiting"
    asking.checks.session_lost(greedy)
    assert asking.checks.wait_count == 1
