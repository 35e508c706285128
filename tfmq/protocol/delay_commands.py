"""The requests and replies about messages that wait for their time; their codes stand with all others in `commands`.

A time to deliver at, a *due*, is a u64. Its top bit tells two kinds apart: set, the rest is a delay in ms from the
moment at which the broker takes it; not set, it is a moment, ms since 1970 by the wall clock. What the broker made
of it, and tells in replies, is the effective due time: a moment of broker time.
"""

from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol.fields import ListOf, Map, Octets, Optional, Text, Whole
from tfmq.protocol.rows import DUE_MAX, Member, Number, PartitionOrNil, Plain, Words, Yes

HANDLE_BYTES: Final = 64
"""A handle has 59 characters (`handles`); another kind may have some more."""
Handle = Annotated[str, Text(HANDLE_BYTES, empty=False)]
HandleOrNone = Annotated[str, Text(HANDLE_BYTES)]
Due = Annotated[int, Whole(0, (1 << 64) - 1, "u64")]


class Edges(ListOf):
    """Two moments or more, each later than the one before."""

    text = "list of u63, ascending"

    def __init__(self) -> None:
        super().__init__(Whole(0, DUE_MAX, "u63"), limits.DELAYED_HISTOGRAM_EDGES)

    def check(self, value: Any, name: str) -> list[int]:
        edges = super().check(value, name)
        if len(edges) < 2 or any(left >= right for left, right in pairwise(edges)):
            raise BadRequest(
                f"The field {name} must be a list of two moments or more, each later than the one before."
            )
        return edges


class CancelDelayed(NamedTuple):
    """Takes back a message that waits for its time; answered once the outcome is on the disk. Repeated, it has the
    first answer.
    """

    handle: Handle


class CancelDelayedReply(NamedTuple):
    state: Words


class RescheduleDelayed(NamedTuple):
    """Gives a message that waits another time, in one step: it gets a new handle, to which the old one leads. Repeated,
    it moves the message once more; the last answer counts.
    """

    handle: Handle
    due: Due


class RescheduleDelayedReply(NamedTuple):
    state: Words
    handle: HandleOrNone


class ListDelayed(NamedTuple):
    """Waiting messages in the order of their turns, with first_due <= due < end_due (the default includes the last of
    times), from the one behind the handle `after` on; topic "", nil partition, nil key: all.
    """

    topic: Member = ""
    partition: PartitionOrNil = None
    key: Annotated[bytes | None, Optional(Octets(limits.KEY_BYTES))] = None
    first_due: Number = 0
    end_due: Number = DUE_MAX
    after: HandleOrNone = ""
    limit: Annotated[int, Whole(1, limits.DELAYED_PER_PAGE)] = int(limits.DELAYED_PER_PAGE)


class ListDelayedReply(NamedTuple):
    delayed: Annotated[list[dict[str, Any]], ListOf(Map(), limits.DELAYED_PER_PAGE)]
    more: Yes
    after: HandleOrNone = ""


class DescribeDelayed(NamedTuple):
    """One delayed message, waiting or not."""

    handle: Handle


class DescribeDelayedReply(NamedTuple):
    description: Plain


class DelayedHistogram(NamedTuple):
    """How many messages wait for the time between each edge and the next one; topic "": of all topics."""

    topic: Member
    edges: Annotated[list[int], Edges()]


class DelayedHistogramReply(NamedTuple):
    counts: Annotated[list[int], ListOf(Whole(0, (1 << 63) - 1, "u63"), limits.DELAYED_HISTOGRAM_EDGES)]
    pending: Number
