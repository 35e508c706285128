"""What happens to dead letters. A store applies events and nothing else; `course` says what each does.

Each has the time at which it happened, `at_ms`, in ms since 1970. Those of whoever has taken a letter bear its `token`,
and do nothing once it is another's.
"""

from __future__ import annotations

from typing import NamedTuple

from tfmq.client.dead_letters import Failure
from tfmq.dead_letters.letter import Journey, Letter


class Keep(NamedTuple):
    """The message was given up, or put off until `next_ms` (0: it is dead). `letter` has its history and `calls`.
    `begun`: besides these, its last call was counted when it began."""

    at_ms: int
    letter: Letter
    next_ms: int = 0
    begun: bool = False


class Begin(NamedTuple):
    """A call in a lane begins, of a message that may have ended its process before. `letter` has the calls that are
    left to one of which nothing was noted yet."""

    at_ms: int
    letter: Letter


class Note(NamedTuple):
    """A call failed, and the consumer keeps the message in its lane; `letter` has the failure, and calls left likewise.
    `begun`: the call was counted when it began."""

    at_ms: int
    letter: Letter
    begun: bool = False


class Pass(NamedTuple):
    """Behind failures that were noted, the message was handled in its lane."""

    at_ms: int


class Take(NamedTuple):
    """`token` handles it now, and has it until `lease_ms`."""

    at_ms: int
    token: str
    lease_ms: int


class Renew(NamedTuple):
    at_ms: int
    token: str
    lease_ms: int


class Handled(NamedTuple):
    at_ms: int
    token: str


class Failed(NamedTuple):
    """It is handled again at `next_ms`, unless its calls are used up; 0: never."""

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class PutOff(NamedTuple):
    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class GiveBack(NamedTuple):
    """It was taken and not handled."""

    at_ms: int
    token: str


class Retry(NamedTuple):
    """A person wants it handled again, with so many calls before it is dead again."""

    at_ms: int
    calls_left: int


class Drop(NamedTuple):
    """A person wants it no more. `force`: also where it may be under way to a topic."""

    at_ms: int
    force: bool = False


class Adopt(NamedTuple):
    """Its message is of this broker. `force`: also where it says another one."""

    at_ms: int
    broker: str
    force: bool = False


class Claim(NamedTuple):
    """`token` sends it again. `waiting`: also one that is to be handled again."""

    at_ms: int
    token: str
    waiting: bool = False


class Depart(NamedTuple):
    """Its place in a stream is settled: from now on it may have been sent."""

    at_ms: int
    token: str
    journey: Journey


class Arrive(NamedTuple):
    """The broker has it, at `offset` (-1: it did not say)."""

    at_ms: int
    producer_id: int
    sequence: int
    offset: int


class Return(NamedTuple):
    """It was not sent under this place (0, 0: it had none yet), and never will be, that is known: it is dead again."""

    at_ms: int
    token: str
    producer_id: int = 0
    sequence: int = 0


Event = (
    Keep
    | Begin
    | Note
    | Pass
    | Take
    | Renew
    | Handled
    | Failed
    | PutOff
    | GiveBack
    | Retry
    | Drop
    | Adopt
    | Claim
    | Depart
    | Arrive
    | Return
)
