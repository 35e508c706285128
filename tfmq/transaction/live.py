"""What the broker knows of a live transaction that nothing durable depends on."""

from collections.abc import Callable

from tfmq.transaction.course import Course
from tfmq.transaction.queue import MaybeWritten


class Live:
    """`timeout_ms`: as its owner was told. `place`: of the record that its state stands for, 0 before the first.

    `sizes`: bytes by target, of what was sent. `sending`: batches on the way to the journal, `recording`: records;
    `missing`: (producer id, sequence) of batches that the disk refused and that have not come again. `reserved`: bytes
    set aside at its targets. `orphan`: its time is over or its session gone while a record was on its way, so it
    ends if that is refused. `unsure`: the disk failed while a record was written, and only a start will tell whether
    it is there. `waiting`: steps that were asked for meanwhile. `course`: after the decision.
    """

    __slots__ = (
        "course",
        "missing",
        "orphan",
        "place",
        "recording",
        "reserved",
        "sending",
        "sizes",
        "timeout_ms",
        "unsure",
        "waiting",
    )

    def __init__(self, timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.place = self.recording = self.reserved = self.sending = 0
        self.sizes: dict[int, int] = {}
        self.missing: set[tuple[int, int]] = set()
        self.orphan = False
        self.unsure: MaybeWritten | None = None
        self.waiting: list[Callable[[], None]] = []
        self.course: Course | None = None
