"""Which letters are meant: what `tfmq dlq list`, `export`, `redrive` filter by. Pure; a store may ask its database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfmq.dead_letters.letter import HANDLED, STATES, Letter
from tfmq.errors import BadRequest

PAGE_LETTERS = 500
"""Letters are read, and sent, so many at a time."""
PAGE_BYTES = 16 << 20
"""And whole ones so much at a time: their bodies are in memory together."""


class Selection(NamedTuple):
    """All that is given must hold. `states` (): any · `error`: part of the last error's text · `since_ms`, `until_ms`:
    when it was first kept, in ms since 1970, the first included and the last not · `ids`: those whose ids begin with
    one of these; (): any. Never meant is what was counted before its first call, and handled by that: it never failed.
    """

    states: tuple[str, ...] = ()
    group: str | None = None
    topic: str | None = None
    partition: int | None = None
    key: str | None = None
    tag: str | None = None
    error: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    ids: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `BadRequest` for states that there are not, or a text in place of several."""
        if isinstance(self.states, str) or any(each not in STATES for each in self.states):
            raise BadRequest(
                f'states={self.states!r}: it takes several of {", ".join(STATES)}, as in ("dead",).'
            )
        if isinstance(self.ids, str):
            raise BadRequest(f"ids={self.ids!r}: it takes several, as in ({self.ids!r},).")

    def holds(self, letter: Letter) -> bool:
        """Whether `letter` is meant."""
        same = (
            (self.group, letter.group),
            (self.topic, letter.topic),
            (self.partition, letter.partition),
            (self.key, key_text(letter.key)),
            (self.tag, letter.tag),
        )
        return (
            not (letter.state == HANDLED and letter.calls <= 1 and not letter.failures)
            and (not self.states or letter.state in self.states)
            and (not self.ids or letter.id.startswith(self.ids))
            and all(wanted is None or wanted == found for wanted, found in same)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
            and (self.since_ms is None or letter.kept_ms >= self.since_ms)
            and (self.until_ms is None or letter.kept_ms < self.until_ms)
        )


class Page(NamedTuple):
    """Where a list goes on: behind the letter that was first kept at `kept_ms` and has this `id`."""

    kept_ms: int = -1
    id: str = ""


def fitting(letters: Sequence[Letter]) -> Sequence[Letter]:
    """The first ones whose bodies are of `PAGE_BYTES` together; at least one, if there is any."""
    size = 0
    for number, each in enumerate(letters):
        size += max(0, each.payload_bytes)
        if number and size > PAGE_BYTES:
            return letters[:number]
    return letters


def key_text(key: bytes | str | None) -> str | None:
    """A key as people write it; bytes that are no UTF-8 with a ? for each that is not."""
    return key.decode(errors="replace") if isinstance(key, bytes) else key


START = Page()
