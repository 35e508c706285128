"""Lines for people, or one object a line."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from tfmq.server import main


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_time_level_logger_and_message() -> None:
    out = io.StringIO()
    main.set_up_logging("info", True, out)
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
    main.set_up_logging("warning", False, out)
    logging.getLogger("tfmq.test").warning("careful")
    logging.getLogger("twisted").info("chatter")
    assert out.getvalue().count("\n") == 1
    assert "WARNING tfmq.test: careful" in out.getvalue()


def test_a_line_for_people_has_the_local_time_with_its_offset() -> None:
    out = io.StringIO()
    main.set_up_logging("info", False, out)
    logging.getLogger("tfmq.test").info("hello")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [+-]\d\d:\d\d INFO    tfmq\.test: hello\n", out.getvalue()
    )
