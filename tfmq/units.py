"""Sizes and durations as people write them, like 64MiB and 1h30m.

KB, MB, GB and TB are powers of 1000. KiB, MiB, GiB and TiB are powers of 1024; K, M, G and T alone are powers of 1024
too, as in Spark and the JVM. Letters may have any case.
"""

import re
from typing import Final

_SIZE_UNITS: Final = {"": 1, "b": 1} | {
    prefix + suffix: (1000 if suffix == "b" else 1024) ** power
    for power, prefix in enumerate("kmgt", 1)
    for suffix in ("", "b", "ib")
}
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER: Final = r"(\d{1,19}(?:\.\d{1,19})?)"
_SIZE: Final = re.compile(rf"{_NUMBER} ?([a-z]*)", re.ASCII)
_BARE_NUMBER: Final = re.compile(_NUMBER, re.ASCII)
_DURATION_PART: Final = re.compile(rf"{_NUMBER} ?(ms|s|min|m|h|d|w) ?", re.ASCII)
_DURATION: Final = re.compile(rf"(?:{_DURATION_PART.pattern})+", re.ASCII)


def parse_size(text: str) -> int | None:
    """Return the bytes of a size like 65536, 64KiB, 1.5 GB or 64m; None if `text` is no size of whole bytes."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _SIZE_UNITS:
        return None
    unit = _SIZE_UNITS[found[2]]
    size = float(found[1]) * unit if "." in found[1] else int(found[1]) * unit
    return int(size) if size == int(size) else None


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration like 30, 500ms, 15m or 1h30m; None if `text` is no duration."""
    text = text.strip().lower()
    if _BARE_NUMBER.fullmatch(text):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    else:
        return None
    return int(seconds) if seconds == int(seconds) else seconds
