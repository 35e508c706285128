"""A decision on its way to its targets: how many do not have their part yet, and who waits to hear of it."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from tfmq.apply_target import Delayed
from tfmq.transaction import states
from tfmq.transaction.transaction import Decision

OFFSETS_MAX: Final = 4096
"""Batches of which the offsets are answered: as many as one TRANSACT may have. More would fill a frame."""

UNKNOWN_OFFSET: Final = -1

DUES_MAX: Final = 65_536
"""Words of due times that one answer tells: half a megabyte. A batch whose messages are all due at once has one."""

Waiting: TypeAlias = Callable[["Course", BaseException | None], None]
"""waiting(course, None) when it is applied, or when it is sure to take long; waiting(course, error) when nobody
knows whether the decision is on the disk."""


class Course:
    """`left`: targets without their part. `unforced`: parts that are written, not known to be on the disk. `stuck`: a
    target stopped before one of those was forced, so nobody sees it until the target is resumed.

    `unsure`: appends of delayed batches that are not known to be on the disk. A commit is answered after they are: a
    message's handle has the number that it got there, which a power cut could give to another one before.

    `delayed`: what is told of delayed batches, by their index; it has `dues` words of due times.

    `damage`: why messages of it cannot be read from the journal, "" while they can. `losses`: messages that a repair of
    the journal gave up after the decision, by target and number, found as they were to be written.

    `reserved`: bytes set aside for it. `offsets`: where each batch begins, -1 where that is not known; empty for many
    batches, for groups and after a restart. `applied`: every target had its part once.
    """

    __slots__ = (
        "applied",
        "damage",
        "decision",
        "delayed",
        "dropped",
        "dues",
        "failure",
        "late",
        "left",
        "losses",
        "offsets",
        "reserved",
        "settling",
        "stuck",
        "unforced",
        "unsure",
        "waiting",
    )

    def __init__(self, decision: Decision, reserved: int = 0, batches: int = 0) -> None:
        self.decision = decision
        self.reserved = reserved
        self.left = self.unforced = self.dropped = self.unsure = self.dues = 0
        self.delayed: dict[int, Delayed] = {}
        self.damage = ""
        self.losses: dict[tuple[int, int], int] = {}
        self.applied = self.late = self.stuck = False
        self.failure: BaseException | None = None
        self.offsets = [UNKNOWN_OFFSET] * batches if batches <= OFFSETS_MAX else []
        self.waiting: list[Waiting] = []
        self.settling: list[Callable[[], None]] = []
        """Who waits until it is safe."""

    @property
    def state(self) -> str:
        """What an answer says of it."""
        there = self.applied and not self.left and not self.stuck
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Messages of it that damage of the journal took, at most."""
        return sum(each.lost for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def safe(self) -> bool:
        """All of it is written, all of that on the disk, and what an answer tells of it is noted."""
        return self.applied and not self.left and not self.unforced and not self.unsure

    @property
    def known(self) -> bool:
        """It is applied, and all that an answer can tell of it is known."""
        return self.applied and not self.unsure

    def wait(self, waiting: Waiting) -> None:
        """Tells `waiting` now if there is something to tell, else later."""
        if self.failure is not None or self.known or self.late:
            waiting(self, self.failure)
        else:
            self.waiting.append(waiting)

    def tell(self) -> None:
        """It is applied, it failed, or it takes long: whoever waits hears which."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each(self, self.failure)

    def tell_safe(self) -> None:
        """All of it is on the disk."""
        settling, self.settling = self.settling, []
        for each in settling:
            each()

    def tell_late(self) -> None:
        """A target takes nothing, or too much time has passed."""
        self.late = True
        self.tell()

    def fail(self, error: BaseException) -> None:
        """The journal stopped before it was known that the decision is on the disk."""
        self.failure = error
        self.tell()

    def note_offsets(self, pieces: Sequence[int], offsets: Sequence[int]) -> None:
        """Where batches of it begin; `pieces`: their numbers, -1 for the rest of one that was noted before."""
        if self.offsets:
            for piece, offset in zip(pieces, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def note_delayed(self, pieces: Sequence[int], delayed: Sequence[Delayed]) -> None:
        """What delayed batches of it came to, as far as an answer has room; `pieces` as above."""
        for piece, each in zip(pieces, delayed, strict=False):
            if self.offsets and piece >= 0 and self.dues + len(each.dues) <= DUES_MAX:
                self.dues += len(each.dues)
                self.delayed[piece] = each
