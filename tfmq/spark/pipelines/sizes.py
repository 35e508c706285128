"""How a command line reads sizes in bytes."""

from __future__ import annotations

import re
from typing import Any, Final

import click

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE: Final = re.compile(r"(\d+) ?([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)


def size_bytes(text: str) -> int:
    """'64M', '64 MiB', '4g', '65536'; units are powers of 1024. Raises ValueError with what to write."""
    found = SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size: write a number above 0 and K, M, G or T, as in 64M")
    return int(found[1]) * UNITS[found[2].upper()]


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return size_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, context)
