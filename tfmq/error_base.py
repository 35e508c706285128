"""What every error of tfmq has: a stable code, a sentence, whether it may have happened, and its details.

The tree of errors stands in `tfmq.errors`, which is where programs import all of this from.
"""

from typing import Any, ClassVar, Literal, overload

Outcome = Literal["not done", "unknown"]
NOT_DONE: Outcome = "not done"
UNKNOWN: Outcome = "unknown"


class TfmqError(Exception):
    """An error of tfmq. `str(error)` is a sentence that says what happened and, where it helps, what to do.

    `sentence` replaces the class's own; `outcome` and `retriable` may be given where the place that raises
    knows better than the class. Everything else given by name becomes a detail: it travels with the error, so
    it must be plain (numbers, text, lists and maps of them).
    """

    number: int = 1
    code: str = "error"
    retriable: bool = False
    outcome: Outcome = UNKNOWN
    closes: ClassVar[bool] = False
    happened: ClassVar[str] = "Something went wrong that this release has no name for."
    advice: ClassVar[str] = "Read the sentence that came with it; a newer client may know more."

    def __init__(
        self,
        sentence: str = "",
        *,
        outcome: Outcome | None = None,
        retriable: bool | None = None,
        **details: Any,
    ) -> None:
        self.sentence = sentence or f"{self.happened} {self.advice}"
        self.details: dict[str, Any] = details
        if outcome is not None:
            self.outcome = outcome
        if retriable is not None:
            self.retriable = retriable
        super().__init__(self.sentence)

    def __str__(self) -> str:
        return self.sentence


class Detail:
    """A number that travels in `details`, read as an attribute; -1 where it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "Detail": ...
    @overload
    def __get__(self, instance: TfmqError, owner: type) -> int: ...
    def __get__(self, instance: TfmqError | None, owner: type) -> "Detail | int":
        if instance is None:
            return self
        value = instance.details.get(self.name, -1)
        return value if isinstance(value, int) else -1


class TextDetail:
    """A word that travels in `details`, read as an attribute; "" where it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "TextDetail": ...
    @overload
    def __get__(self, instance: TfmqError, owner: type) -> str: ...
    def __get__(self, instance: TfmqError | None, owner: type) -> "TextDetail | str":
        if instance is None:
            return self
        value = instance.details.get(self.name, "")
        return value if isinstance(value, str) else ""
