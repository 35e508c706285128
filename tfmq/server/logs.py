"""The server's log on standard error: plain lines for people, or one JSON object a line. Never payloads."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """One object a line: time (UTC, ISO 8601), level, logger, message, and the traceback as `error`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class PlainLines(logging.Formatter):
    """Lines for people: the time is local, with its offset from UTC as everywhere."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")
        return f"{time[:-6]} {time[-6:]}"


def set_up(level: str, as_json: bool, stream: TextIO = sys.stderr) -> None:
    """Log from `level` on to `stream`; Twisted's own words from warnings on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else PlainLines(PLAIN))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("twisted").setLevel(logging.WARNING)


def take_twisted() -> None:
    """Let Twisted log through the standard loggers; once a process."""
    from twisted.logger import STDLibLogObserver, globalLogBeginner

    globalLogBeginner.beginLoggingTo([STDLibLogObserver("twisted")], redirectStandardIO=False)
