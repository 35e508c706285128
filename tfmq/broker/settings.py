"""What the configuration and a topic's own settings make of one log: the key set for the topic, else the
broker's.

Precedence for a topic: what it was created with, then `[topic."NAME"]` of the configuration, then the plain
key.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from journal.options import LogOptions
from tfmq.errors import BadRequest

SEGMENT_BYTES_MIN: Final = 1 << 20
"""Smaller files would be more names than data."""

SEGMENT_BYTES_MAX: Final = 1 << 40
NUMBER_MAX: Final = (1 << 63) - 1


def _whole(low: int, high: int) -> tuple[str, Callable[[Any], bool]]:
    return f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def _seconds() -> tuple[str, Callable[[Any], bool]]:
    return (
        "a number of seconds, not negative",
        lambda value: type(value) in (int, float) and 0 <= value <= NUMBER_MAX,
    )


KEYS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "flush.messages": _whole(0, NUMBER_MAX),
    "flush.seconds": _seconds(),
    "log.segment_bytes": _whole(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX),
    "retention.seconds": _seconds(),
    "retention.bytes": _whole(0, NUMBER_MAX),
    "retention.action": ('"delete" or "archive"', lambda value: value in ("delete", "archive")),
}
"""The keys that a topic may have for itself: what they take, in words and as a check."""


def check(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a topic that is to be made. Raises BadRequest for an unknown key or a bad value."""
    for key, value in settings.items():
        if key not in KEYS:
            raise BadRequest(f"A topic has no setting {key[:80]}; it may have {', '.join(sorted(KEYS))}.")
        wanted, fits = KEYS[key]
        if not fits(value):
            raise BadRequest(f"The setting {key} must be {wanted}, not {value!r:.80}.")
    return dict(settings)


def options(
    values: Mapping[str, Any], topic: Mapping[str, Any], own: Mapping[str, Any], archive_folder: str
) -> LogOptions:
    """The options of a topic's logs from the broker's `values`, the configuration for the topic, and its
    own.
    """
    found = {key: own.get(key, topic.get(key, values[key])) for key in KEYS}
    archive = found["retention.action"] == "archive"
    return LogOptions(
        segment_bytes=found["log.segment_bytes"],
        flush_messages=found["flush.messages"],
        flush_seconds=found["flush.seconds"],
        retention_seconds=found["retention.seconds"],
        retention_bytes=found["retention.bytes"],
        retention_action=found["retention.action"],
        archive_folder=archive_folder if archive else None,
    )
