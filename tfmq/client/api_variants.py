"""Makes the methods of the API variants (blocking, asyncio, Twisted) from the operations of `tfmq.client`.

    class Admin:
        grow_topic = blocking(AdminCore.grow_topic)   # awaitable(...) for asyncio, deferred(awaitable(...)) for Twisted

Such a derived method has the parameters and the docstring of the operation, and returns the operation's result. The
method calls the operation with `self._core` in place of `self`; the driver `self._driver` then runs the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import cleandoc, formatannotation, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, overload

from tfmq.client.operation import Operation

Variant = TypeVar("Variant")
Core = TypeVar("Core")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Converted = TypeVar("Converted")


@overload
def blocking(
    operation: Callable[Concatenate[Core, Parameters], Operation[Result]],
) -> Callable[Concatenate[Any, Parameters], Result]: ...


@overload
def blocking(
    operation: Callable[Concatenate[Core, Parameters], Operation[Result]], convert: Callable[[Result], Converted]
) -> Callable[Concatenate[Any, Parameters], Converted]: ...


def blocking(operation: Callable[..., Operation[Any]], convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a method that runs `operation` and returns its result, or `convert(result)` if `convert` is given."""

    @wraps(operation)
    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        result = self._driver.run(operation(self._core, *arguments, **named))
        return result if convert is None else convert(result)

    return set_result(method, converted_annotation(operation, convert))


@overload
def awaitable(
    operation: Callable[Concatenate[Core, Parameters], Operation[Result]],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]]: ...


@overload
def awaitable(
    operation: Callable[Concatenate[Core, Parameters], Operation[Result]], convert: Callable[[Result], Converted]
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Converted]]: ...


def awaitable(operation: Callable[..., Operation[Any]], convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a coroutine method that runs `operation` and returns its result, or `convert(result)` if given."""

    @wraps(operation)
    async def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        result = await self._driver.run(operation(self._core, *arguments, **named))
        return result if convert is None else convert(result)

    return set_result(method, converted_annotation(operation, convert))


def shared(method: Callable[Concatenate[Core, Parameters], Result]) -> Callable[Concatenate[Any, Parameters], Result]:
    """Return `method`, typed so that another class can have it. That class needs the attributes that `method` uses."""
    return method


def set_result(method: Variant, annotation: str) -> Variant:
    """Give the wrapper `method` the signature of the function that it wraps, with `annotation` as return type."""
    wrapped: Any = method.__wrapped__  # type: ignore[attr-defined]
    method.__annotations__ = {**wrapped.__annotations__, "return": annotation}
    method.__signature__ = signature(wrapped).replace(return_annotation=annotation)  # type: ignore[attr-defined]
    return method


def converted_annotation(operation: Callable[..., Any], convert: Callable[[Any], Any] | None) -> str:
    if isinstance(convert, type):
        return convert.__name__
    if convert is not None:
        return return_annotation(convert)
    found = signature(operation).return_annotation
    if not isinstance(found, str):
        return formatannotation(get_args(found)[-1])
    return found.removeprefix("Operation[").removesuffix("]")


def return_annotation(function: Callable[..., Any]) -> str:
    found = signature(function).return_annotation
    return found if isinstance(found, str) else formatannotation(found)


def name_methods(variant: type[Variant]) -> type[Variant]:
    """Class decorator: name each derived method after its attribute in `variant`. Error messages show this name."""
    for name, member in vars(variant).items():
        module, qualname = variant.__module__, f"{variant.__qualname__}.{name}"
        function = member if hasattr(member, "__wrapped__") else None
        if function is not None:
            function.__name__, function.__module__ = name, module
        while function is not None:
            function.__qualname__ = qualname
            function = getattr(function, "__wrapped__", None)
    return variant


def copy_docs_from(other: type) -> Callable[[type[Variant]], type[Variant]]:
    """Return a class decorator that copies the docstrings of `other`'s methods to the methods of the same names.

    A method's own docstring is appended to the copied one. The class docstring of `other` is appended to the docstring
    of the decorated class. The decorator also applies `name_methods`.
    """

    def describe(variant: type[Variant]) -> type[Variant]:
        for name, member in vars(variant).items():
            theirs = getattr(other, name, None)
            if name.startswith("_") or not callable(member) or theirs is None:
                continue
            own = f"\n\n{member.__doc__}" if member.__doc__ not in (None, theirs.__doc__) else ""
            member.__doc__ = f"{theirs.__doc__}{own}"
        variant.__doc__ = f"{cleandoc(variant.__doc__ or '')}\n\n{cleandoc(other.__doc__ or '')}"
        return name_methods(variant)

    return describe
