"""Calls, and the errors of error replies."""

from __future__ import annotations

import weakref

import pytest

import tfmq
from tests.client.fake_broker import CUT, HOLD, LOSE, SWALLOW, FakeBroker, Session
from tests.client.rig import Rig
from tfmq import aio
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.connection import DEADLINES_KEPT, PendingRequest, connection_error, error_from_reply
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    BadFrame,
    Busy,
    Closed,
    ConnectionFailed,
    Damaged,
    TfmqError,
    TimedOut,
    VersionMismatch,
    to_error_reply,
)
from tfmq.protocol.commands import BY_REQUEST, CreateTopic, Hello, Metadata, Ping


def test_a_call_says_what_it_is() -> None:
    call = PendingRequest(Ping(), BY_REQUEST[Ping], (), correlation_id=7)
    assert repr(call) == "<PendingRequest PING 7 open>" and not call.done
    call.complete()
    assert "answered" in repr(call)
    call.error = TfmqError("no")
    with pytest.raises(TfmqError, match="no"):
        call.result()


def test_an_error_reply_becomes_its_error() -> None:
    sent = Damaged("a range is gone", first=10, next=20)
    got = error_from_reply([-sent.number, 7, *to_error_reply(sent)[1:]])
    assert isinstance(got, Damaged) and (got.first, got.next) == (10, 20)
    assert got.sentence == "a range is gone" and got.outcome == "not done"


@pytest.mark.parametrize("header", [[-999, 1], [-4, 1, 5, 5, 5, 5], [-999, 1, "new_code", "odd", "words", {}]])
def test_one_that_is_not_well_formed_is_reported_as_it_came(header: list[object]) -> None:
    error = error_from_reply(header)
    assert error.outcome == "unknown" and error.number == -header[0]  # type: ignore[operator]


def test_one_that_is_late_may_have_happened_only_if_it_was_sent() -> None:
    call = PendingRequest(Ping(), BY_REQUEST[Ping], (), correlation_id=1)
    assert call.timeout_error("broker:1").outcome == NOT_DONE
    call.sent = True
    late = call.timeout_error("broker:1")
    assert late.outcome == UNKNOWN and "broker:1 did not reply to PING in time" in str(late)


# The sentence for a connection that could not be made or broke.

HERE, THERE = BrokerAddress("127.0.0.1", 8367), BrokerAddress("broker.example", 9000)


def test_who_refuses_is_named_with_all_that_were_asked() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    failure = connection_error(refused, THERE, (HERE, THERE), was_connected=False)
    assert isinstance(failure, ConnectionFailed) and failure.__cause__ is refused
    assert failure.sentence.startswith("Nothing listens at 127.0.0.1:8367 or broker.example:9000:")


def test_what_the_broker_said_itself_is_reported_as_it_is() -> None:
    said = Busy("The broker is stopping.")
    assert connection_error(said, HERE, (HERE,), was_connected=True) is said


def test_what_cannot_be_read_is_reported_with_the_address() -> None:
    failure = connection_error(BadFrame("That is no frame."), HERE, (HERE,), was_connected=True)
    assert isinstance(failure, ConnectionFailed)
    assert failure.sentence == "127.0.0.1:8367: That is no frame."


@pytest.mark.parametrize(
    ("error", "was_connected", "sentence"),
    [
        (ConnectionResetError("reset by peer"), True, "8367 was lost: reset by peer."),
        (OSError("no route"), False, "8367 could not be made: no route."),
        (None, True, "8367 was lost."),
        (EOFError(), True, "8367 was lost."),
    ],
)
def test_else_it_says_whether_there_was_one(error: Exception | None, was_connected: bool, sentence: str) -> None:
    assert connection_error(error, HERE, (HERE,), was_connected).sentence.endswith(sentence)


# The conversation with a broker: calls are done exactly once, in every order of breaking and coming back.


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nothing_is_dialled_before_the_first_request(rig: Rig) -> None:
    rig.exchange()
    assert rig.dialled == []
    rig.link.send_request(Ping())
    rig.exchange()
    assert len(rig.dialled) == 1


def test_a_call_is_answered(rig: Rig) -> None:
    call = rig.link.send_request(Ping())
    assert not call.done
    rig.exchange()
    assert call.done and call.result().time_ms == 1_700_000_000_000
    assert not rig.link.has_pending_requests


def test_hello_is_sent_first_and_returns_the_limits() -> None:
    rig = Rig(FakeBroker(limits={"message_bytes": 17}))
    rig.link.send_request(Ping())
    rig.exchange()
    assert [type(each) for each in rig.broker.requests] == [Hello, Ping]
    assert rig.link.limits["message_bytes"] == 17
    assert rig.link.limits["frame_bytes"] > 0


def test_hello_says_whether_an_operator_uses_the_client(rig: Rig) -> None:
    rig.link.operator = True
    rig.link.send_request(Ping())
    rig.exchange()
    assert rig.broker.requests[0].details["operator"] is True
    assert [each._driver.link.operator for each in (tfmq.Admin("a"), aio.Admin("a"))] == [True, True]
    assert not tfmq.Consumer("a", topics="orders")._driver.link.operator


def test_answers_may_come_in_any_order(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    slow, quick = rig.link.send_request(Ping()), rig.link.send_request(Ping())
    rig.exchange()
    assert quick.done and not slow.done
    rig.broker.release()
    rig.exchange()
    assert slow.done


def test_requests_that_are_done_do_not_stay_in_memory_while_another_one_waits(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    waiting = rig.link.send_request(Ping(), seconds=60)
    rig.exchange()
    done = []
    for _ in range(DEADLINES_KEPT + 50):
        done.append(weakref.ref(rig.link.send_request(Ping(), seconds=120)))
        rig.exchange()
    assert sum(each() is not None for each in done) <= DEADLINES_KEPT
    rig.advance(70)
    with pytest.raises(TimedOut):
        waiting.result()


def test_an_error_reply_is_raised(rig: Rig) -> None:
    rig.broker.plan(Ping, Busy("not now"))
    call = rig.link.send_request(Ping())
    rig.exchange()
    with pytest.raises(Busy, match="not now"):
        call.result()


def test_a_call_that_may_be_repeated_never_sees_the_connection_break(rig: Rig) -> None:
    rig.broker.plan(Ping, LOSE, CUT)
    calls = [rig.link.send_request(Ping()) for _ in range(3)]
    rig.advance(1)
    assert [call.result().time_ms > 0 for call in calls] == [True] * 3
    assert rig.link.connection_count == 3


def test_what_goes_out_again_keeps_its_order(rig: Rig) -> None:
    rig.broker.plan(Metadata, HOLD, HOLD, LOSE)
    for name in ("a", "b", "c", "d"):
        rig.link.send_request(Metadata([name], True))
    rig.advance(1)
    asked = [each.topics[0] for each in rig.broker.requests if isinstance(each, Metadata)]
    assert asked == ["a", "b", "c", "a", "b", "c", "d"]


def test_a_request_that_passes_with_time_is_made_anew_each_time_it_goes_out(rig: Rig) -> None:
    rig.broker.plan(Metadata, CUT, CUT)
    times = iter(("a", "b", "c", "d"))
    call = rig.link.send_request(Metadata(["first"]), update=lambda request: request._replace(topics=[next(times)]))
    rig.exchange()
    rig.advance(5)
    assert call.done and call.error is None
    assert [each.topics for each in rig.broker.requests if isinstance(each, Metadata)] == [["a"], ["b"], ["c"]]


def test_a_call_that_must_not_be_repeated_fails_with_an_unknown_outcome(rig: Rig) -> None:
    rig.broker.plan(Ping, CUT)
    call = rig.link.send_request(Ping(), repeat=False)
    rig.exchange()
    with pytest.raises(ConnectionFailed) as caught:
        call.result()
    assert caught.value.outcome == "unknown"


def test_one_that_was_not_sent_waits_for_the_next_connection(rig: Rig) -> None:
    rig.reachable = False
    call = rig.link.send_request(Ping(), repeat=False)
    rig.exchange()
    rig.reachable = True
    rig.advance(1)
    assert call.done and call.error is None


def test_a_broker_that_starts_soon_is_waited_for_and_one_that_is_not_there_is_reported(rig: Rig) -> None:
    rig.reachable = False
    call = rig.link.send_request(Ping())
    rig.advance(1)
    assert not call.done
    rig.advance(3)
    with pytest.raises(ConnectionFailed, match="Nothing listens at broker:8367: start tfmq-server") as caught:
        call.result()
    assert caught.value.outcome == "not done"
    assert len(rig.dialled) < 20


def test_every_server_of_the_list_is_tried(rig: Rig) -> None:
    rig = Rig(servers=3)
    rig.reachable = False
    rig.link.send_request(Ping())
    rig.exchange()
    assert [server.port for server in rig.dialled] == [8367, 8368, 8369]


def test_once_it_was_there_a_broker_is_waited_for_until_the_call_is_late(rig: Rig) -> None:
    rig.link.send_request(Ping())
    rig.exchange()
    rig.reachable = False
    rig.cut()
    call = rig.link.send_request(Ping(), seconds=20)
    rig.advance(19)
    assert not call.done
    rig.advance(2)
    with pytest.raises(ConnectionFailed) as caught:
        call.result()
    assert caught.value.outcome == "not done"


def test_a_new_call_does_not_wait_out_the_pause_that_an_earlier_one_left(rig: Rig) -> None:
    rig.link.send_request(Ping())
    rig.exchange()
    rig.reachable = False
    rig.cut()
    rig.link.send_request(Ping(), seconds=2)
    rig.advance(2.1)  # the pause after the last attempt is 1.6 s by now
    assert not rig.link.has_pending_requests
    rig.reachable = True
    call = rig.link.send_request(Ping(), seconds=2)
    rig.advance(0.1)
    assert call.done and call.error is None


def test_short_calls_one_after_the_other_do_not_dial_without_a_pause(rig: Rig) -> None:
    rig.link.send_request(Ping())
    rig.exchange()
    rig.reachable = False
    rig.cut()
    dialled = len(rig.dialled)
    for _ in range(100):
        rig.link.send_request(Ping(), seconds=0.01)
        rig.advance(0.01)
    assert len(rig.dialled) - dialled <= 21


def test_a_late_answer_is_a_time_out_and_the_connection_stays(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    call = rig.link.send_request(Ping(), seconds=1)
    rig.advance(2)
    with pytest.raises(TimedOut) as caught:
        call.result()
    assert caught.value.outcome == "unknown" and isinstance(caught.value, TimeoutError)
    rig.broker.release()
    after = rig.link.send_request(Ping())
    rig.exchange()
    assert after.done and rig.link.connection_count == 1


def test_a_call_given_up_leaves_the_connection_usable(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    call = rig.link.send_request(Ping())
    rig.exchange()
    rig.link.abandon(call)
    assert isinstance(call.error, Abandoned)
    rig.broker.release()
    after = rig.link.send_request(Ping())
    rig.exchange()
    assert after.done and after.error is None


def test_something_else_at_the_port_is_named_at_once(rig: Rig) -> None:
    call = rig.link.send_request(Ping())
    assert rig.link.wants_connection()
    rig.link.connected()
    with pytest.raises(BadFrame) as caught:
        rig.link.received(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    rig.link.disconnected(caught.value)
    with pytest.raises(ConnectionFailed, match="an HTTP server"):
        call.result()


def test_a_version_that_is_not_spoken_is_reported_at_once(rig: Rig) -> None:
    rig.broker.plan(Hello, VersionMismatch("upgrade"))
    call = rig.link.send_request(Ping())
    with pytest.raises(VersionMismatch) as caught:
        rig.exchange()
    rig.cut(caught.value)
    with pytest.raises(VersionMismatch):
        call.result()


def test_a_port_that_takes_connections_and_says_nothing_is_left(rig: Rig) -> None:
    rig.broker.plan(Hello, SWALLOW)
    call = rig.link.send_request(Ping(), seconds=60)
    rig.exchange()
    rig.time += 11
    with pytest.raises(ConnectionFailed, match="did not reply to HELLO") as caught:
        rig.link.tick()
    rig.cut(caught.value)
    assert call.done
    assert isinstance(call.error, ConnectionFailed), "its patience was over by then"
    call = rig.link.send_request(Ping(), seconds=60)
    rig.advance(1)
    assert call.done and call.error is None


def test_close_fails_what_is_open_and_takes_nothing_more(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    call = rig.link.send_request(Ping())
    rig.exchange()
    rig.link.close()
    with pytest.raises(Abandoned) as sent:
        call.result()
    assert sent.value.outcome == "unknown"
    with pytest.raises(Closed):
        rig.link.send_request(Ping())


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_what_never_left_was_not_done_and_what_left_may_have_been(rig: Rig, end: str) -> None:
    rig.broker.plan(Ping, HOLD)
    left = rig.link.send_request(Ping())
    rig.exchange()
    rig.cut()
    waits = rig.link.send_request(Ping())
    for call, outcome in ((left, "unknown"), (waits, "not done")):
        if end == "close":
            rig.link.close()
        else:
            rig.link.abandon(call)
        assert call.error is not None and call.error.outcome == outcome


def test_without_a_reply_a_call_is_done_once_it_is_written(rig: Rig) -> None:
    rig.link.send_request(Ping())
    rig.exchange()
    rig.broker.plan(Ping, SWALLOW)
    call = rig.link.send_request(Ping(), wants_reply=False)
    assert not call.done
    rig.exchange()
    assert call.done and call.error is None


def test_listeners_are_called_for_every_new_session(rig: Rig) -> None:
    heard: list[int] = []
    rig.link.on_ready.append(lambda link: heard.append(link.connection_count))
    rig.link.send_request(Ping())
    rig.exchange()
    rig.cut()
    rig.link.send_request(Ping())
    rig.exchange()
    assert heard == [1, 2]


def test_unattended_calls_are_counted_until_they_are_done(rig: Rig) -> None:
    call = rig.link.send_request(Ping(), in_background=True)
    assert rig.link.background_requests == 1
    rig.exchange()
    assert call.done and rig.link.background_requests == 0


def test_a_renewed_link_knows_nothing_of_before(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    call = rig.link.send_request(Ping())
    rig.exchange()
    rig.link.reset()
    assert not call.done and not rig.link.has_pending_requests and rig.link.state == "down"


def test_an_unreadable_reply_fails_its_call_only(rig: Rig) -> None:
    call = rig.link.send_request(CreateTopic("a", 1, {}))
    assert rig.link.wants_connection()
    rig.link.connected()
    rig.broker.plan(CreateTopic, SWALLOW)
    session = Session(rig.broker)
    session.take(b"".join(rig.link.output))
    rig.link.received(b"".join(session.output))
    session.output.clear()
    session.say([0, call.correlation_id, "not a number"])
    rig.link.received(b"".join(session.output))
    with pytest.raises(TfmqError, match="CREATE_TOPIC"):
        call.result()


def test_who_waits_for_a_first_connection_is_notified_once_and_soon(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tfmq")
    rig.reachable = False
    call = rig.link.send_request(Ping())
    rig.advance(0.4)
    assert caplog.messages == ["Nothing listens at broker:8367 yet: waiting 2 s."]
    rig.advance(3)
    assert call.done and len(caplog.messages) == 1
