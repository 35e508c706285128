"""The server's log on standard error: lines of plain text, or one JSON object per line. It never contains payloads."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

BY_PEER = {"by_peer": True}
"""`extra` of a log line that any peer can cause as often as it likes; `PeerLineFilter` limits such lines."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the traceback as `error`."""

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


class PlainFormatter(logging.Formatter):
    """Plain text lines, with local time and its offset from UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")
        return f"{time[:-6]} {time[-6:]}"


PEER_LINES_MAX = 50
"""Lines of a kind in PEER_LINES_SECONDS that peers can cause, so that a flood of connections does not fill the disk."""
PEER_LINES_SECONDS = 10.0


class PeerLineFilter(logging.Filter):
    """Drops lines with the attribute `by_peer` above the limit. The next line of the kind says how many it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, tuple[float, int]] = {}
        """Text of a line, before its values are inserted -> start of its period, number of its lines in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "by_peer", False):
            return True
        start, count = self._counts.get(record.msg, (record.created, 0))
        if not 0 <= record.created - start < PEER_LINES_SECONDS:
            dropped, start, count = count - PEER_LINES_MAX, record.created, 0
            if dropped > 0:
                kind, record.msg = record.msg, f"{record.msg} ({dropped} such lines before it were left out)"
                self._counts[kind] = start, 1
                return True
        self._counts[record.msg] = start, count + 1
        return count < PEER_LINES_MAX


def set_up_logging(level: str, as_json: bool, stream: TextIO = sys.stderr) -> None:
    """Log messages of `level` and above to `stream`. Of Twisted's own messages, log only warnings and errors."""
    handler = logging.StreamHandler(stream)
    plain = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(plain))
    handler.addFilter(PeerLineFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("twisted").setLevel(logging.WARNING)
