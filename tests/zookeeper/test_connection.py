"""Connections to ZooKeeper: made when they are needed, anew in a child, with errors of ours."""

from __future__ import annotations

import logging
import os
import sys

import pytest
from kazoo import exceptions

from tfmq.errors import Closed, NotAllowed, NotSupported, StoreFailed
from tfmq.zookeeper.connection import (
    REMEMBERED_MESSAGES_MAX,
    REPEAT_SECONDS,
    ThrottledLogFilter,
    ZooKeeperConnection,
    new_client,
    translate_errors,
    wait_results,
)
from tfmq.zookeeper.group_coordinator import GroupMembership
from tfmq.zookeeper.paths import zookeeper_address


def test_a_connection_is_made_when_it_is_first_used_and_kept(address: str) -> None:
    connection = ZooKeeperConnection(zookeeper_address(address))
    with connection.client() as first:
        first.ensure_path("/tfmq-connection")
    with connection.client() as second:
        assert second is first and second.exists("/tfmq-connection")
    connection.close()
    connection.close()
    assert not first.connected
    with pytest.raises(Closed), connection.client():
        pass


def test_a_forked_child_has_a_session_of_its_own(address: str) -> None:
    connection = ZooKeeperConnection(zookeeper_address(address))
    with connection.client() as client:
        parents = client.client_id[0]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with connection.client() as client:
                os.write(writing, b"%d" % client.client_id[0])
            connection.close()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert int(pipe.read()) != parents
    os.waitpid(child, 0)
    with connection.client() as client:
        assert client.client_id[0] == parents and client.exists("/") is not None
    connection.close()


def test_results_come_in_order_with_errors_in_their_places(address: str) -> None:
    connection = ZooKeeperConnection(zookeeper_address(address))
    with connection.client() as client:
        found = wait_results([client.get_async("/"), client.get_async("/is-not-there")])
    assert found[0][0] == b"" and isinstance(found[1], exceptions.NoNodeError)
    connection.close()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (exceptions.ConnectionLoss, StoreFailed),
        (exceptions.SessionExpiredError, StoreFailed),
        (exceptions.OperationTimeoutError, StoreFailed),
        (exceptions.ConnectionClosedError, StoreFailed),
        (exceptions.NoAuthError, NotAllowed),
    ],
)
def test_kazoos_errors_become_ours(raised: type[Exception], expected: type[Exception]) -> None:
    with pytest.raises(expected, match="zookeeper://a:1/meta"), translate_errors(zookeeper_address("a:1/meta")):
        raise raised()


def test_without_kazoo_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(NotSupported, match=r"tfmq\[zookeeper\]"):
        new_client(zookeeper_address("a"), 10)
    with pytest.raises(NotSupported, match=r"tfmq\[zookeeper\]"):  # where the consumer is made, not in its thread
        GroupMembership("a", "group", "member", session_seconds=10, on_change=lambda: None)


class Said:
    """kazoo's words about its connections: warnings, and each once a minute."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sparing = ThrottledLogFilter(lambda: self.now)

    def __call__(self, text: str, level: int = logging.WARNING) -> bool:
        return self.sparing.filter(logging.LogRecord("kazoo", level, "", 0, "%s", (text,), None))


def test_the_same_words_are_said_once_a_minute() -> None:
    said = Said()
    assert [said("refused"), said("refused"), said("timed out")] == [True, False, True]
    said.now += REPEAT_SECONDS - 0.1
    assert not said("refused")
    said.now += 0.2
    assert said("refused")


def test_what_is_no_warning_is_not_said() -> None:
    assert not Said()("connecting", logging.INFO)


def test_words_that_are_never_the_same_are_not_kept() -> None:
    said = Said()
    assert all(said(f"number {number}") for number in range(3 * REMEMBERED_MESSAGES_MAX))
    assert len(said.sparing._logged_at) <= REMEMBERED_MESSAGES_MAX
