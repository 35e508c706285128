"""Which of the first rows of a line may fire now: up to one that is cancelled, or being so, or would be early."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tfmq.delay.rows import NO_PART, Part, no_part

if TYPE_CHECKING:
    from tfmq.delay.lines import Lines


class Ready(NamedTuple):
    """`part`: these may fire, none if the first has to wait. `cancelled`: so many of the first never will.

    `early`: by the wall clock the first one's time has not come, nor that of others among them; by so many ms.
    """

    part: Part
    cancelled: int = 0
    early: Part = NO_PART
    early_ms: Sequence[int] = ()


def ready(part: Part, lines: Lines, doubtful: int | None = None) -> Ready:
    """See the module; `part` has at least one row. From the due `doubtful` on none fires."""
    if doubtful is not None and part.dues[-1] >= doubtful:
        part = part.cut(bisect_left(part.dues, doubtful))
        if not len(part.numbers):
            return Ready(part)
    if lines.blocked:
        for index in range(len(part.numbers)):
            if part.turn(index) in lines.blocked:
                part = part.cut(index)
                break
        if not len(part.numbers):
            return Ready(part)
    if lines.cancelled.any_between(part.dues[0], part.dues[-1]):
        gone = [turn in lines.cancelled for turn in zip(part.dues, part.numbers, strict=True)]
        if gone[0]:
            return Ready(part, gone.index(False) if False in gone else len(gone))
        if True in gone:
            part = part.cut(gone.index(True))
    if any(part.flags) and not lines.time.steady:
        return _until_early(part, lines)
    return Ready(part)


def _until_early(part: Part, lines: Lines) -> Ready:
    columns = zip(part.dues, part.numbers, part.flags, strict=True)
    early = [lines.time.early_ms(due, number) if flag else 0 for due, number, flag in columns]
    first = next((index for index, each in enumerate(early) if each), None)
    if first is None:
        return Ready(part)
    if first:
        return Ready(part.cut(first))
    waits = no_part()
    for index, each in enumerate(early):
        if each:
            waits.dues.append(part.dues[index])
            waits.numbers.append(part.numbers[index])
            waits.locators.append(part.locators[index])
            waits.flags.append(part.flags[index])
    return Ready(part, 0, waits, [each for each in early if each])
