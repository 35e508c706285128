"""Arguments of a call of the JSON API, checked, and values as JSON that every browser reads without loss."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from tfmq.errors import BadRequest
from tfmq.limits import KEY_BYTES, TEXT_BYTES
from tfmq.message import Ordinal

EXACT_NUMBER_MAX: Final = (1 << 53) - 1
"""The largest whole number that JavaScript keeps exactly; larger ones are sent as text."""
PAGE_ROWS: Final = 50
PAGE_ROWS_MAX: Final = 100
"""Rows of one page: what a person reads at a time. Each may cost a command and a read of the disk."""
BYTES_SHOWN_MAX: Final = 4096
"""Bytes of a key, a tag or a property that are shown; longer ones are cut off."""
ANY_NUMBER_MAX: Final = (1 << 63) - 1
_DIGITS: Final = re.compile(r"[0-9]{1,19}")


class Arguments:
    """The arguments of one call: the query of the URL (all texts), or the JSON object of a POST.

    Each method returns one argument, and raises `BadRequest` with a sentence about it. `known`: the names of all
    arguments; another one is refused, because the caller would not notice that it has no effect.
    """

    def __init__(self, given: Mapping[str, Any], known: Collection[str]) -> None:
        surplus = sorted(given.keys() - set(known))
        if surplus:
            raise BadRequest(f"There is no argument {surplus[0][:80]!r}: they are {', '.join(known) or 'none'}.")
        self._given = given

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text. Without a default it must be given, and not be empty."""
        found = self._given.get(name)
        if found is None or (found == "" and default is not None):
            if default is None:
                raise BadRequest(f"The argument {name} is missing.")
            return default
        if not isinstance(found, str) or not found or len(found.encode("utf-8", "replace")) > TEXT_BYTES:
            raise BadRequest(f"The argument {name} must be a text of 1 to {TEXT_BYTES:d} bytes.")
        return found

    def number(self, name: str, default: int | None = None, *, low: int = 0, high: int = ANY_NUMBER_MAX) -> int:
        found = self._given.get(name)
        if found is None or found == "":
            if default is None:
                raise BadRequest(f"The argument {name} is missing.")
            return default
        if isinstance(found, str) and _DIGITS.fullmatch(found):
            found = int(found)
        if type(found) is not int or not low <= found <= high:
            raise BadRequest(f"The argument {name} must be a whole number from {low} to {high}.")
        return found

    def flag(self, name: str) -> bool:
        found = self._given.get(name)
        if found not in (None, "", True, False, "true", "false"):
            raise BadRequest(f"The argument {name} must be true or false.")
        return found in (True, "true")

    def texts(self, name: str, most: int) -> list[str]:
        """Return a list of at most `most` texts, in a query separated by commas; [] if it is not given."""
        found = self._given.get(name)
        if found is None or found == "":
            return []
        if isinstance(found, str):
            found = found.split(",")
        is_list = isinstance(found, list) and len(found) <= most
        if not is_list or not all(isinstance(each, str) and 0 < len(each) <= TEXT_BYTES for each in found):
            raise BadRequest(f"The argument {name} must be a list of at most {most} texts.")
        return list(found)

    def limit(self, most: int = PAGE_ROWS_MAX) -> int:
        """Return the argument `limit`, the number of rows of a page."""
        return self.number("limit", min(PAGE_ROWS, most), low=1, high=most)

    def key(self) -> bytes | None:
        """Return the key in `key` (text) or in `key_base64`; None if neither is given."""
        text, encoded = self._given.get("key"), self._given.get("key_base64")
        if text is None and encoded is None:
            return None
        try:
            key = str(text).encode() if encoded is None else base64.b64decode(str(encoded), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise BadRequest("The key is no valid text, or key_base64 is no base64.") from None
        if len(key) > KEY_BYTES:
            raise BadRequest(f"A key has at most {KEY_BYTES:d} bytes.")
        return key

    def position(self, name: str, default: str) -> str | int | datetime | Ordinal:
        """Return a position in a partition: earliest, latest, offset:N, ordinal:N, or time:MS (since 1970)."""
        text = self.text(name, default)
        kind, _, number = text.partition(":")
        if kind in ("earliest", "latest") and not number:
            return kind
        if _DIGITS.fullmatch(number) and int(number) <= ANY_NUMBER_MAX:
            if kind == "offset":
                return int(number)
            if kind == "ordinal":
                return Ordinal(int(number))
            if kind == "time":
                return time_of(int(number), name)
        raise BadRequest(f"The argument {name} must be earliest, latest, offset:N, ordinal:N or time:MS, not {text!r}.")


def time_of(time_ms: int, name: str) -> datetime:
    """Return a time in ms since 1970 as a datetime. Raises `BadRequest` for a time after the year 9999."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise BadRequest(f"The argument {name} has a time after the year 9999.") from None


# Values as JSON


def to_json(value: Any) -> bytes:
    """Encode a reply. Whole numbers above EXACT_NUMBER_MAX become texts, other values as `shown` says."""
    return json.dumps(_exact(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(each) for each in value]
    if type(value) is int and abs(value) > EXACT_NUMBER_MAX:
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return shown_bytes(bytes(value))
    return value


def shown_bytes(data: bytes | None, most: int = BYTES_SHOWN_MAX) -> dict[str, Any] | None:
    """Return bytes for display: the first `most` of them in base64, and how many there are. None stays None."""
    if data is None:
        return None
    return {"base64": base64.b64encode(data[:most]).decode(), "size": len(data)}


def shown_key(key: bytes | str | None) -> dict[str, Any] | None:
    """Return a key for display, like `shown_bytes`; `is_text` says whether it was sent as text."""
    found = shown_bytes(key.encode("utf-8", "replace") if isinstance(key, str) else key)
    return None if found is None else {**found, "is_text": isinstance(key, str)}


def shown_text(text: str) -> str:
    """Return a text for display, cut off after BYTES_SHOWN_MAX characters."""
    return text if len(text) <= BYTES_SHOWN_MAX else text[:BYTES_SHOWN_MAX] + "…"
