"""The defaults that the pages promise."""

from __future__ import annotations

from journal.log.segments import LogOptions


def test_defaults() -> None:
    options = LogOptions()
    assert (options.segment_bytes, options.state_bytes) == (1 << 30, 64 << 20)
    assert (options.flush_messages, options.flush_seconds) == (1000, 10)
    assert (options.retention_seconds, options.retention_bytes, options.retention_action) == (0, 0, "delete")
    assert options.suffix == ".zxQueue"
