"""Names that are settled for a later release, on both faces: whoever types one is told so, not that it is unknown."""

from __future__ import annotations

from typing import Any, NoReturn

from tfmq.errors import NotSupported


def later(what: str, instead: str) -> NoReturn:
    """Raises `NotSupported`."""
    raise NotSupported(f"{what} needs a later release; {instead}.")


class LaterConsuming:
    """What consumers will do."""

    __slots__ = ()

    def run(
        self, listener: Any = None, *, workers: int = 1, order: str = "partition", signals: bool = True
    ) -> NoReturn:
        """Have listeners handle messages, with retries and dead letters: a later release. Raises `NotSupported`."""
        later("run()", "loop over the consumer, or poll()")

    def on(self, topic: str) -> NoReturn:
        """Register a listener: a later release. Raises `NotSupported`."""
        later("on()", "loop over the consumer, or poll()")
