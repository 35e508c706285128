"""A client with the addresses of several servers finds the one that is primary, also when another one becomes it."""

from __future__ import annotations

import pytest

from tests.client.fake_broker import HOLD, LOSE, SWALLOW, FakeBroker, Session
from tests.client.replicas import (
    ACCEPTS_ONLY,
    CLOSES,
    DOWN,
    SILENT,
    STANDBY,
    ReplicaRig,
    ReplicaSenderRig,
    ReplicaSession,
)
from tfmq.client.connection.addresses import find_address, is_address, parse_servers
from tfmq.client.connection.connection import SHORT_CONNECTIONS_MAX, ClientConnection
from tfmq.errors import NOT_DONE, UNKNOWN, ConnectionFailed, LoginFailed, NotPrimary
from tfmq.protocol.commands import Hello, Metadata, Ping, Produce


def rig_whose_primary_is_silent(servers: int = 3) -> ReplicaRig:
    """Return a rig that is connected to a primary which has just fallen silent; no server is primary."""
    rig = ReplicaRig(servers=servers)
    rig.replicas.primary = "a:8367"
    rig.link.send_request(Ping())
    rig.exchange()
    rig.hangs = True
    rig.replicas.states["a:8367"] = SILENT
    rig.replicas.primary = ""
    return rig


def test_a_standby_is_left_for_the_primary_that_it_names() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "c:8367"
    call = rig.link.send_request(Ping())
    rig.exchange()
    assert call.result() and rig.dialled_names == "ac"
    assert str(rig.link.server) == "c:8367" and rig.time == 1000.0


@pytest.mark.parametrize("named", ["", "elsewhere:8367", "10.0.0.9:8367", "no address", "c:8368"])
def test_who_is_not_of_the_list_is_never_connected_to_and_the_others_are_tried(named: str) -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "c:8367"
    rig.replicas.names = {"a:8367": named, "b:8367": named}
    call = rig.link.send_request(Ping())
    rig.exchange()
    assert call.result() and rig.dialled_names == "abc"


def test_a_name_in_other_letters_is_the_same_server_and_the_address_of_the_list_is_used() -> None:
    servers = parse_servers("tfmqs://ann:pw@Broker-A:8367,broker-b:8367,[::1]:9?ca=x.pem")
    assert [find_address(each, servers) for each in ("broker-a:8367", "BROKER-B:8367", "[::1]:9")] == [0, 1, 2]
    assert find_address("broker-a:9", servers) is None
    for wrong in ("", "a", "a:b", "a:8367/x", "tfmq://a:8367", "a b:1", "a:8367\n", "u:p@a:8367", "a" * 300 + ":1"):
        assert not is_address(wrong) and find_address(wrong, servers) is None


def test_a_named_primary_that_is_not_there_costs_one_attempt_a_round() -> None:
    rig = ReplicaRig()
    rig.replicas.names = {"a:8367": "b:8367", "c:8367": "b:8367"}
    rig.replicas.states["b:8367"] = DOWN
    call = rig.link.send_request(Ping())
    rig.exchange()
    assert rig.dialled_names == "abc" and not call.done
    rig.replicas.primary = "c:8367"
    rig.advance(1)
    assert call.result()


def test_standbys_that_name_each_other_are_asked_once_a_round_and_the_third_is_found() -> None:
    rig = ReplicaRig()
    rig.replicas.names = {"a:8367": "b:8367", "b:8367": "a:8367"}
    rig.replicas.primary = "c:8367"
    call = rig.link.send_request(Ping())
    rig.exchange()
    assert call.result() and rig.dialled_names == "abc"


def test_without_a_primary_the_rounds_have_pauses_and_the_first_request_waits_for_a_failover() -> None:
    rig = ReplicaRig()
    call = rig.link.send_request(Ping(), seconds=60)
    rig.advance(15)
    assert not call.done, "a lease is longer than the time for a broker that does not listen yet"
    assert 3 * 20 < len(rig.dialled) < 3 * 40
    rig.replicas.primary = "b:8367"
    rig.advance(0.7)
    assert call.result()


def test_no_primary_in_time_is_an_error_that_says_so() -> None:
    rig = ReplicaRig()
    call = rig.link.send_request(Ping(), seconds=60)
    rig.advance(31)
    with pytest.raises(NotPrimary, match=r"a:8367 is a standby.* None of the servers of this client is primary yet"):
        call.result()
    assert isinstance(call.error, ConnectionFailed) and call.error.retriable and call.error.outcome == NOT_DONE


@pytest.mark.parametrize(
    ("servers", "named", "advice"),
    [
        (1, "b:8367", "b:8367 is the primary: add it to the addresses of this client"),
        (2, "other:1", "other:1 is the primary: add it to the addresses of this client"),
        (1, "", "No primary is known: give the addresses of all servers"),
        (1, "\x1b[31m", "No primary is known: give the addresses of all servers"),
    ],
)
def test_an_address_that_is_missing_is_named_soon(servers: int, named: str, advice: str) -> None:
    rig = ReplicaRig(servers=servers)
    rig.replicas.names = {"a:8367": named, "b:8367": named}
    call = rig.link.send_request(Ping())
    rig.advance(3)
    with pytest.raises(NotPrimary, match=advice) as caught:
        call.result()
    assert caught.value.primary == (named if is_address(named) else "")
    assert "\x1b" not in str(caught.value)


def test_a_lost_primary_is_tried_last_whoever_names_it() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.link.send_request(Ping())
    rig.exchange()
    rig.replicas.states["a:8367"] = SILENT
    rig.replicas.names = {"b:8367": "a:8367"}
    rig.replicas.primary = "c:8367"
    rig.cut()
    call = rig.link.send_request(Ping())
    rig.exchange()
    assert call.result() and rig.dialled_names == "abc" and rig.time == 1000.0


@pytest.mark.parametrize("state", [SILENT, ACCEPTS_ONLY])
def test_a_server_that_does_not_answer_costs_two_seconds(state: str) -> None:
    rig = ReplicaRig()
    rig.replicas.states["a:8367"] = state
    rig.replicas.primary = "b:8367"
    call = rig.link.send_request(Ping())
    rig.advance(1.9)
    assert not call.done
    rig.advance(0.2)
    assert call.result() and rig.dialled_names == "ab"


def test_the_only_server_is_waited_for() -> None:
    rig = ReplicaRig(servers=1)
    rig.replicas.states["a:8367"] = SILENT
    rig.link.send_request(Ping(), seconds=600)
    rig.advance(60)
    assert rig.dialled_names == "a"


def test_a_primary_that_falls_silent_is_left_although_its_connection_stays() -> None:
    """A process that is stopped, or a machine without power: nothing comes, not even the end of the connection."""
    rig = rig_whose_primary_is_silent()
    rig.replicas.primary = "b:8367"
    call = rig.link.send_request(Metadata(None), seconds=60)
    rig.advance(6.1)
    assert call.done and call.error is None and rig.dialled_names == "ab"


@pytest.mark.parametrize("later", [0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4])
def test_a_server_that_was_silent_is_tried_shortly_while_a_standby_may_become_primary(later: float) -> None:
    """`later`: seconds from the client's leaving the silent server until the standby serves."""
    rig = rig_whose_primary_is_silent(servers=2)
    call = rig.link.send_request(Metadata(None), seconds=60)
    rig.advance(6.1)
    assert rig.dialled_names == "aba", "the standby is none yet"
    rig.advance(later)
    assert not call.done
    rig.replicas.primary = "b:8367"
    rig.advance(0.9)
    assert call.result()


def test_a_standby_that_closes_the_connection_because_it_becomes_primary_is_tried_again_at_once() -> None:
    rig = ReplicaRig(servers=2)
    rig.replicas.primary = "a:8367"
    rig.link.send_request(Ping())
    rig.exchange()
    rig.replicas.states["a:8367"] = DOWN
    rig.replicas.primary = ""
    rig.cut()
    call = rig.link.send_request(Metadata(None), seconds=60)
    rig.advance(7)
    rig.replicas.states["b:8367"] = CLOSES
    count = len(rig.dialled)
    rig.advance(0.7)
    assert len(rig.dialled) - count >= 2, "it was in the middle of becoming primary"
    rig.replicas.states["b:8367"] = STANDBY
    rig.replicas.primary = "b:8367"
    rig.advance(0.3)
    assert call.result()
    # One that closes its connections again and again is tried less and less often, as any other one.
    rig.replicas.states["b:8367"] = CLOSES
    rig.cut()
    call = rig.link.send_request(Metadata(None), seconds=90)
    rig.advance(20)
    count = len(rig.dialled)
    rig.advance(20)
    assert len(rig.dialled) - count <= 30 and not call.done


def test_a_server_that_stays_silent_gets_as_much_time_as_one_that_was_never_there() -> None:
    rig = rig_whose_primary_is_silent(servers=2)
    call = rig.link.send_request(Metadata(None), seconds=90)
    rig.advance(40)
    count = len(rig.dialled)
    rig.advance(20)
    assert 14 <= len(rig.dialled) - count <= 20 and not call.done, "2 s each, and the other one between them"
    rig.replicas.states.clear()
    rig.replicas.primary = "a:8367"
    rig.advance(4.0)
    assert call.result()


def test_a_broker_that_is_slow_or_idle_is_not_left() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.broker.plan(Metadata, HOLD)
    call = rig.link.send_request(Metadata(None), seconds=100)
    rig.advance(60)
    assert rig.dialled_names == "a" and not call.done, "it answers PING"
    pings = len([each for each in rig.broker.requests if isinstance(each, Ping)])
    assert 11 <= pings <= 16
    rig.broker.release()
    rig.advance(60)
    assert call.done and rig.dialled_names == "a"
    assert len([each for each in rig.broker.requests if isinstance(each, Ping)]) <= pings + 1, "none while it is idle"


def test_a_program_that_was_stopped_itself_does_not_blame_the_broker() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.broker.plan(Metadata, HOLD)
    rig.link.send_request(Metadata(None), seconds=1000)
    rig.exchange()
    for _ in range(2):
        rig.time += 3.01
        rig.link.tick()
    assert rig.link.output, "a PING"
    rig.time += 100
    rig.link.tick()  # the program goes on, and has not read yet what has arrived meanwhile
    rig.advance(10)
    assert rig.dialled_names == "a"


def test_without_replication_a_silent_broker_is_waited_for_as_ever() -> None:
    rig = ReplicaRig()
    rig.replicas.open_session = lambda address: Session(rig.broker)  # type: ignore[method-assign]
    rig.broker.plan(Metadata, SWALLOW)
    rig.link.send_request(Metadata(None), seconds=60)
    rig.advance(50)
    assert rig.dialled_names == "a" and not any(isinstance(each, Ping) for each in rig.broker.requests)


def test_a_request_that_a_standby_refuses_goes_to_the_primary_as_if_it_had_not_been_sent() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.link.send_request(Ping())
    rig.exchange()
    rig.replicas.demote(rig.broker.sessions)
    rig.replicas.primary = "b:8367"
    kept = rig.link.send_request(Metadata(None))
    once = rig.link.send_request(Metadata(["orders"], True), repeat=False)
    rig.exchange()
    assert kept.result() is not None and rig.dialled_names == "ab"
    assert once.result() is not None, "it waited for the primary, and was executed there"
    assert (kept.send_count, once.send_count) == (1, 1)


def test_an_earlier_attempt_that_may_have_been_executed_stays_unknown() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.broker.plan(Metadata, LOSE, NotPrimary())
    rig.replicas.names = {"b:8367": "a:8367", "c:8367": "a:8367"}
    call = rig.link.send_request(Metadata(["x"], True), seconds=5)

    def second_is_the_last(link: ClientConnection) -> None:
        if link.connection_count == 2:
            rig.replicas.primary = ""

    rig.link.on_ready.append(second_is_the_last)
    rig.advance(6)
    assert call.send_count == 1 and rig.link.connection_count == 2
    assert isinstance(call.error, NotPrimary) and call.error.outcome == UNKNOWN


def test_a_primary_in_name_only_is_not_asked_without_pauses() -> None:
    """Its HELLO says primary, and every request is refused: it was deposed, and has not noticed."""
    rig = ReplicaRig()
    rig.replicas.primary = "a:8367"
    rig.broker.plan(Metadata, *[NotPrimary(primary="a:8367")] * 1000)
    call = rig.link.send_request(Metadata(None), seconds=20)
    rig.advance(21)
    assert call.done and len(rig.dialled) < 3 * 60


@pytest.mark.parametrize("servers", [1, 2])
def test_connections_of_no_use_get_pauses_although_each_brings_an_answer(servers: int) -> None:
    """A peer that answers one request and closes, or several servers that say that they are primary and refuse."""
    rig = ReplicaRig(servers=servers)
    rig.replicas.open_session = lambda address: ReplicaSession(rig.broker, True, "")  # type: ignore[method-assign]
    rig.broker.plan(Metadata, *[NotPrimary() if servers > 1 else LOSE] * 1000)
    rig.link.on_ready.append(lambda link: link.send_request(Ping()))
    rig.link.send_request(Metadata(None), seconds=100)
    rig.advance(60)
    assert SHORT_CONNECTIONS_MAX <= len(rig.dialled) < SHORT_CONNECTIONS_MAX + 5 * 60
    rig.broker.plans.clear()
    call = rig.link.send_request(Metadata(None), seconds=100)
    rig.advance(3)
    assert call.result()


def test_a_server_without_an_answer_to_hello_does_not_hide_why_there_is_no_primary() -> None:
    rig = ReplicaRig(servers=2)
    rig.replicas.states["a:8367"] = ACCEPTS_ONLY
    call = rig.link.send_request(Ping(), seconds=5)
    rig.advance(6)
    assert isinstance(call.error, NotPrimary) and "standby" in str(call.error)


def test_a_program_that_was_stopped_while_it_connects_reads_the_answer() -> None:
    rig = ReplicaRig(servers=2)
    rig.replicas.primary = "a:8367"
    call = rig.link.send_request(Ping(), seconds=100)
    rig._connect()
    rig.time += 30
    rig.link.tick()  # the program goes on, and has not read yet what has arrived meanwhile
    rig.exchange()
    assert call.result() and not rig.dialled, "this connection is used"


def test_a_wrong_password_at_the_primary_is_reported_although_standbys_answer() -> None:
    rig = ReplicaRig()
    rig.replicas.primary = "b:8367"
    rig.broker.plan(Hello, None, LoginFailed("wrong"))
    call = rig.link.send_request(Ping())
    rig.advance(3)
    assert isinstance(call.error, LoginFailed)


def test_a_client_for_standbys_stays_there_and_gets_their_errors() -> None:
    rig = ReplicaRig()
    rig.link.accepts_standby = True
    call = rig.link.send_request(Metadata(None))
    rig.exchange()
    assert isinstance(call.error, NotPrimary) and rig.dialled_names == "a"


def test_a_reader_of_standbys_is_told_what_a_standby_lacks() -> None:
    rig = ReplicaRig()
    rig.link.reads_standby = True
    call = rig.link.send_request(Metadata(None))
    rig.exchange()
    rig.advance(60)
    assert isinstance(call.error, NotPrimary) and "is a standby without replicate.read=true" in str(call.error)


# Producers: nothing is doubled, nothing is lost, and the order stays.


def test_batches_in_flight_are_stored_once_and_in_order_when_the_primary_changes() -> None:
    rig = ReplicaSenderRig(batch_bytes=1, servers=3)
    rig.replicas.primary = "b:8367"
    first = rig.send(b"0")
    rig.settle(first)
    assert first.result().durability == "replicated"
    rig.broker.plan(Produce, None, None, LOSE)  # the third is stored, and its answer is lost with the primary
    later = [rig.send(b"%d" % number) for number in range(1, 6)]
    rig.replicas.primary, rig.replicas.states["b:8367"] = "c:8367", DOWN
    rig.settle(*later)
    assert rig.broker.payloads("orders") == [b"%d" % number for number in range(6)]
    assert rig.dialled_names.startswith("ab") and rig.dialled_names.endswith("c")


def test_batches_that_a_deposed_primary_refuses_are_stored_once_and_in_order() -> None:
    rig = ReplicaSenderRig(batch_bytes=1, servers=3)
    rig.replicas.primary = "a:8367"
    rig.settle(rig.send(b"0"))
    rig.replicas.demote(rig.broker.sessions)
    later = [rig.send(b"%d" % number) for number in range(1, 6)]
    rig.exchange()
    rig.time += 12
    rig.replicas.primary = "c:8367"
    rig.settle(*later)
    assert rig.broker.payloads("orders") == [b"%d" % number for number in range(6)]
    assert {each[0].attempts for each in later} == {1}, "a refused attempt is none"


def test_messages_wait_for_a_primary_up_to_their_timeout_and_then_say_why() -> None:
    rig = ReplicaSenderRig(servers=2, timeout=5)
    rig.replicas.primary = "a:8367"
    rig.settle(rig.send(b"0"))
    rig.replicas.demote(rig.broker.sessions)
    waits = rig.send(b"1")
    rig.settle(waits)
    error = waits.error()
    assert isinstance(error, NotPrimary) and error.outcome == NOT_DONE and "standby" in str(error)
    rig.replicas.primary = "b:8367"
    rig.settle(rig.send(b"2"))
    assert rig.broker.payloads("orders") == [b"0", b"2"]


def test_hello_says_that_the_client_knows_the_durability_of_replicas() -> None:
    rig = ReplicaRig(FakeBroker())
    rig.replicas.primary = "a:8367"
    rig.link.send_request(Ping())
    rig.exchange()
    hello = rig.broker.requests[0]
    assert hello.details["features"] == ["replicated"] and list(hello.details)[-1] == "line"
