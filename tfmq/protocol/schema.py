"""Kinds of fields. A kind validates the value of a field that was received in a request or a reply.

A request is a NamedTuple whose annotations contain the kinds: `offset: Annotated[int, Integer(0, 9)]`. So types,
defaults and validation have one source.
"""

from typing import Any, Generic, NoReturn, Protocol, TypeVar, get_type_hints

from tfmq import limits
from tfmq.bounded_msgpack import Malformed, check_depth
from tfmq.errors import BadRequest


class Kind(Protocol):
    """Defines which values a field accepts.

    `check(value, name)` returns the value as the code uses it, or raises BadRequest with the name of the field.
    """

    @property
    def text(self) -> str:
        """The kind as docs/protocol.md names it."""

    def check(self, value: Any, name: str) -> Any: ...


def _reject(name: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    raise BadRequest(f"The field {name} must be {wanted}, not {shown[:80]}.")


class Integer:
    """An integer from `low` to `high`, both included."""

    def __init__(self, low: int, high: int, text: str = "") -> None:
        self.low, self.high = low, high
        self.text = text or f"{low}..{high}"

    def check(self, value: Any, name: str) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        _reject(name, f"a whole number from {self.low} to {self.high}", value)


class Flag:
    """A boolean."""

    text = "bool"

    def check(self, value: Any, name: str) -> bool:
        if type(value) is bool:
            return value
        _reject(name, "true or false", value)


class Text:
    """A string of at most `size` bytes in UTF-8; not "" if `empty` is False."""

    def __init__(self, size: int = limits.TEXT_BYTES, empty: bool = True) -> None:
        self.size, self.empty = size, empty
        self.text = f"str of {'at most' if empty else '1 to'} {size:d} bytes"

    def check(self, value: Any, name: str) -> str:
        # Strings from the wire are valid UTF-8, without lone surrogates.
        fits = type(value) is str and (len(value) * 4 <= self.size or len(value.encode()) <= self.size)
        if fits and (value or self.empty):
            return str(value)
        _reject(name, f"a text of {'at most' if self.empty else '1 to'} {self.size:d} bytes", value)


class ByteString:
    """A byte string of at most `size` bytes. Its length is a multiple of `piece`, and not 0 if `piece` is above 1."""

    def __init__(self, size: int, piece: int = 1, text: str = "") -> None:
        self.size, self.piece = size, piece
        self.text = text or f"bin of at most {size:d} bytes"

    def check(self, value: Any, name: str) -> bytes:
        fits = type(value) is bytes and len(value) <= self.size and not len(value) % self.piece
        if fits and (value or self.piece == 1):
            return bytes(value)
        if type(value) is bytes and len(value) > self.size:
            raise BadRequest(f"The field {name} has {len(value)} bytes, {self.size:d} at most are allowed.")
        _reject(name, self.text, value)


class Name:
    """A name that `limits.is_valid_name` accepts; also "" if `empty` is set."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.text = 'name or ""' if empty else "name"

    def check(self, value: Any, name: str) -> str:
        if (
            type(value) is str
            and len(value) <= limits.NAME_LENGTH
            and (limits.is_valid_short_name(value) or (self.empty and not value))
        ):
            return value
        _reject(name, "a name of 1 to 249 letters A-Z a-z, digits, '.', '_' or '-', and not '.' or '..'", value)


class Map:
    """A map with strings as keys; the values may be nested as deep as `check_depth` permits."""

    text = "map"

    def check(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is dict and len(value) <= limits.MAP_ITEMS and all(type(key) is str for key in value):
            try:
                check_depth(value)
            except Malformed as error:
                raise BadRequest(f"The field {name} is {error}.") from None
            return value
        _reject(name, f"a map from text, with at most {limits.MAP_ITEMS:d} entries", value)


class Optional:
    """A value that `kind` accepts, or nil."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.text = f"{kind.text}, or nil"

    def check(self, value: Any, name: str) -> Any:
        return None if value is None else self.kind.check(value, name)


class ListOf:
    """A list with at most `count` entries of `kind`."""

    def __init__(self, kind: Kind, count: int) -> None:
        self.kind, self.count = kind, count
        self.text = f"list of {kind.text}"

    def check(self, value: Any, name: str) -> list[Any]:
        if type(value) is not list or len(value) > self.count:
            _reject(name, f"a list of at most {self.count:d} entries", value)
        check, checked = self.kind.check, []
        for item in value:
            checked.append(check(item, name))
        return checked


_new = tuple.__new__
Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


class Record(Generic[Tuple]):
    """An array that becomes a NamedTuple. Missing trailing fields get their defaults, additional ones are ignored."""

    def __init__(self, shape: type[Tuple]) -> None:
        self.shape = shape
        hints = get_type_hints(shape, include_extras=True)
        self.names: tuple[str, ...] = tuple(hints)
        self.kinds: tuple[Kind, ...] = tuple(hint.__metadata__[0] for hint in hints.values())
        self.defaults: dict[str, Any] = shape._field_defaults  # type: ignore[attr-defined]
        self.decode: Any = self._compile()
        """`decode(values, name, start=0)` returns the NamedTuple of `values[start:]`. Raises BadRequest if a field is
        invalid, or `values` is no list."""
        self.check = self.decode

    def _compile(self) -> Any:
        """Return `decode` as one generated function. It has no loop over fields, so a request takes 4 calls, not 12."""
        fields = [f"v{number}" for number in range(len(self.names))]
        row = "".join(f"{field}, " for field in fields)
        required = len(fields) - len(self.defaults)
        lines = [
            "def decode(values, name, start=0):",
            "    if type(values) is not list: reject_list(name, values)",
            "    count = len(values) - start",
            f"    if count < {len(fields)}:",
            f"        if count < {required}: reject_short(values[start:], name)",
            f"        values, start = [*values[start:], *defaults[count - {required}:]], 0",
            f"    [{row}] = values[start:start + {len(fields)}]",
        ]
        scope: dict[str, Any] = {
            "new": _new,
            "shape": self.shape,
            "defaults": tuple(self.defaults.values()),
            "reject_list": lambda name, value: _reject(name, f"a list {self.text}", value),
            "reject_short": self._reject_short,
        }
        for number, (field, name, kind) in enumerate(zip(fields, self.names, self.kinds, strict=True)):
            check, wanted = f"check_{field}", f"{field} is not None"
            if isinstance(kind, Integer):
                wanted = f"type({field}) is not int or not {kind.low} <= {field} <= {kind.high}"
            elif isinstance(kind, Flag):
                wanted = f"type({field}) is not bool"
            elif not isinstance(kind, Optional):
                wanted = "True"
            if number >= required:
                wanted = f"count > {number} and ({wanted})"
            scope[check] = kind.check
            lines.append(f"    if {wanted}: {field} = {check}({field}, {name!r})")
        exec("\n".join([*lines, f"    return new(shape, ({row}))"]), scope)
        return scope["decode"]

    @property
    def text(self) -> str:
        return f"[{', '.join(self.names)}]"

    def _reject_short(self, values: list[Any], name: str) -> NoReturn:
        for value, kind, field in zip(values, self.kinds, self.names, strict=False):
            kind.check(value, field)
        raise BadRequest(f"{name} lacks its field {self.names[len(values)]}.")
