"""Shared documentation of the API variants.

The asyncio and Twisted classes copy the docstrings of the blocking classes.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import TypeVar

Variant = TypeVar("Variant")


def copy_docs_from(other: type) -> Callable[[type[Variant]], type[Variant]]:
    """Return a class decorator that copies method docstrings from `other`.

    A method's own docstring is appended to the copied one.
    """

    def describe(face: type[Variant]) -> type[Variant]:
        for name, member in vars(face).items():
            theirs = getattr(other, name, None)
            if name.startswith("_") or not callable(member) or theirs is None:
                continue
            own = f"\n\n{member.__doc__}" if member.__doc__ else ""
            member.__doc__ = f"{theirs.__doc__}{own}"
        face.__doc__ = f"{cleandoc(face.__doc__ or '')}\n\n{cleandoc(other.__doc__ or '')}"
        return face

    return describe
