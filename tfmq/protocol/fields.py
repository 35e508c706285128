"""The kinds of fields that requests and replies have: what each takes from the wire, and how a page names it.

`kind.check(value, name)` gives the value as the code uses it, or raises `BadRequest` with a sentence that
names the field. A request is a NamedTuple whose annotations carry the kind: `offset: Annotated[int, Whole(0,
9)]`, so that types, defaults and checks have one source.
"""

from typing import Any, Generic, NoReturn, Protocol, TypeVar, get_type_hints

from tfmq import limits
from tfmq.bounded_msgpack import Malformed, check_depth
from tfmq.errors import BadRequest


class Kind(Protocol):
    """What a field takes."""

    @property
    def text(self) -> str:
        """The kind in the words of docs/protocol.md."""
        ...

    def check(self, value: Any, name: str) -> Any: ...


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    raise BadRequest(f"The field {name} must be {wanted}, not {shown[:80]}.")


class Whole:
    """A whole number from `low` to `high`, both included."""

    def __init__(self, low: int, high: int, text: str = "") -> None:
        self.low, self.high = low, high
        self.text = text or f"{low}..{high}"

    def check(self, value: Any, name: str) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        _refuse(name, f"a whole number from {self.low} to {self.high}", value)


class Flag:
    """True or false."""

    text = "bool"

    def check(self, value: Any, name: str) -> bool:
        if type(value) is bool:
            return value
        _refuse(name, "true or false", value)


class Text:
    """A text of at most `size` bytes in UTF-8; not "" where `empty` is false."""

    def __init__(self, size: int = limits.TEXT_BYTES, empty: bool = True) -> None:
        self.size, self.empty = size, empty
        self.text = f"str of {'at most' if empty else '1 to'} {size:d} bytes"

    def check(self, value: Any, name: str) -> str:
        if type(value) is str and (value or self.empty) and self._fits(value):
            return value
        _refuse(name, f"a text of {'at most' if self.empty else '1 to'} {self.size:d} bytes", value)

    def _fits(self, value: str) -> bool:
        """Whether it is short enough. A text off the wire is valid UTF-8; a lone surrogate never gets here."""
        return len(value) * 4 <= self.size or len(value.encode()) <= self.size


class Octets:
    """At most `size` bytes, in whole pieces of `piece` bytes; not b"" where these are more than one."""

    def __init__(self, size: int, piece: int = 1, text: str = "") -> None:
        self.size, self.piece = size, piece
        self.text = text or f"bin of at most {size:d} bytes"

    def check(self, value: Any, name: str) -> bytes:
        fits = type(value) is bytes and len(value) <= self.size and not len(value) % self.piece
        if fits and (value or self.piece == 1):
            return bytes(value)
        if type(value) is bytes and len(value) > self.size:
            raise BadRequest(f"The field {name} has {len(value)} bytes, {self.size:d} at most are allowed.")
        _refuse(name, self.text, value)


class Name:
    """A name as `limits.valid_name` has it; "" too where `empty` says so."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.text = 'name or ""' if empty else "name"

    def check(self, value: Any, name: str) -> str:
        if type(value) is str and (limits.valid_name(value) or (self.empty and not value)):
            return value
        _refuse(name, "a name of 1 to 249 letters, digits, '.', '_' or '-', and not '.' or '..'", value)


class Map:
    """A map from text to plain values."""

    text = "map"

    def check(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is dict and len(value) <= limits.MAP_ITEMS and all(type(key) is str for key in value):
            try:
                check_depth(value)
            except Malformed as error:
                raise BadRequest(f"The field {name} is {error}.") from None
            return value
        _refuse(name, f"a map from text, with at most {limits.MAP_ITEMS:d} entries", value)


class Optional:
    """`kind`, or nil."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.text = f"{kind.text}, or nil"

    def check(self, value: Any, name: str) -> Any:
        return None if value is None else self.kind.check(value, name)


class ListOf:
    """A list of at most `count` of `kind`."""

    def __init__(self, kind: Kind, count: int) -> None:
        self.kind, self.count = kind, count
        self.text = f"list of {kind.text}"

    def check(self, value: Any, name: str) -> list[Any]:
        if type(value) is not list or len(value) > self.count:
            _refuse(name, f"a list of at most {self.count:d} entries", value)
        check = self.kind.check
        return [check(item, name) for item in value]


_new = tuple.__new__
Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


class Row(Generic[Tuple]):
    """An array read into a NamedTuple: missing trailing fields take their defaults, further ones are
    ignored.
    """

    def __init__(self, shape: type[Tuple]) -> None:
        self.shape = shape
        hints = get_type_hints(shape, include_extras=True)
        self.names: tuple[str, ...] = tuple(hints)
        self.kinds: tuple[Kind, ...] = tuple(hint.__metadata__[0] for hint in hints.values())
        self.defaults: dict[str, Any] = shape._field_defaults  # type: ignore[attr-defined]
        # Most fields are whole numbers: those are compared in place, (1, 0) sends the others to their kind.
        self._columns = tuple(
            (kind.low, kind.high, kind.check, name) if type(kind) is Whole else (1, 0, kind.check, name)
            for kind, name in zip(self.kinds, self.names, strict=True)
        )

    @property
    def text(self) -> str:
        return f"[{', '.join(self.names)}]"

    def check(self, value: Any, name: str) -> Tuple:
        if type(value) is not list:
            _refuse(name, f"a list {self.text}", value)
        return self.read(value, name)

    def read(self, values: list[Any], name: str, start: int = 0) -> Tuple:
        """The NamedTuple made of `values[start:]`. Raises `BadRequest` for a wrong field."""
        fields = [
            value if type(value) is int and low <= value <= high else check(value, field)
            for value, (low, high, check, field) in zip(
                values[start:] if start else values, self._columns, strict=False
            )
        ]
        if len(fields) < len(self.names):
            self._complete(fields, name)
        return _new(self.shape, fields)

    def _complete(self, fields: list[Any], name: str) -> None:
        for field in self.names[len(fields) :]:
            if field not in self.defaults:
                raise BadRequest(f"{name} lacks its field {field}.")
            fields.append(self.defaults[field])
