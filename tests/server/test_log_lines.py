"""Lines for people, or one object a line."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from tests.server.fakes import Net
from tests.server.test_session import Client
from tests.server.test_transport import connected
from tfmq.server.log_lines import PEER_LINES_MAX, PEER_LINES_SECONDS, PeerLineFilter, set_up_logging


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_time_level_logger_and_message() -> None:
    out = io.StringIO()
    set_up_logging("info", True, out)
    logging.getLogger("tfmq.test").info("hällo %d", 5)
    logging.getLogger("tfmq.test").debug("not this")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logging.getLogger("tfmq.test").exception("failed")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "tfmq.test", "hällo 5")
    assert first["time"].endswith("+00:00")
    assert "ZeroDivisionError" in second["error"]


def test_a_plain_line_is_for_people() -> None:
    out = io.StringIO()
    set_up_logging("warning", False, out)
    logging.getLogger("tfmq.test").warning("careful")
    logging.getLogger("twisted").info("chatter")
    assert out.getvalue().count("\n") == 1
    assert "WARNING tfmq.test: careful" in out.getvalue()


def test_a_line_for_people_has_the_local_time_with_its_offset() -> None:
    out = io.StringIO()
    set_up_logging("info", False, out)
    logging.getLogger("tfmq.test").info("hello")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [+-]\d\d:\d\d INFO    tfmq\.test: hello\n", out.getvalue()
    )


def test_lines_that_any_peer_can_cause_are_limited_and_counted() -> None:
    lines = PeerLineFilter()
    passed: list[str] = []

    def log(text: str, created: float, by_peer: bool = True) -> None:
        record = logging.LogRecord("tfmq.server", logging.INFO, "", 0, text, ("a",), None)
        record.created = created
        if by_peer:
            record.by_peer = True
        if lines.filter(record):
            passed.append(record.getMessage())

    for number in range(PEER_LINES_MAX + 7):
        log("refused: %s", 100.0 + number / 100)
        log("administrative: %s", 100.0, by_peer=False)
    assert (passed.count("refused: a"), passed.count("administrative: a")) == (PEER_LINES_MAX, PEER_LINES_MAX + 7)
    log("another: %s", 101.0)
    log("refused: %s", 100.0 + PEER_LINES_SECONDS)
    log("refused: %s", 101.0 + PEER_LINES_SECONDS)
    assert passed[-3:] == ["another: a", "refused: a (7 such lines before it were left out)", "refused: a"]
    passed.clear()
    for _ in range(PEER_LINES_MAX):
        log("refused: %s", 102.0 + PEER_LINES_SECONDS)
    assert len(passed) == PEER_LINES_MAX - 2


def test_what_peers_cause_is_marked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        net = Net()
        net.bring(connected(net)[0], b"\xff" * 16)
        connected(net)[0].cut_off("a test")
        client = Client(hello=False)
        client.net.bring(client.connection, b"\xff" * 16)
    assert len(caplog.records) == 2
    assert all(getattr(record, "by_peer", False) for record in caplog.records)
