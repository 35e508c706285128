"""What became of transactions that are over, by name, for days: so that a late repeat gets the true answer.

An outcome takes 32 bytes: a digest of the name, the epoch, time and state. The newest are a dict; older ones lie in
sealed runs sorted by digest, which are merged as they age and dropped whole when the newest of a run is too old, or
when there are too many, the oldest run first.
"""

from typing import NamedTuple


class Outcome(NamedTuple):
    """`state`: "committed" or "rolled_back". `time_ms`: when it was decided, wall clock."""

    epoch: int
    state: str
    time_ms: int


class Outcomes:
    """See the module."""

    def __init__(self, *, outcomes_max: int, keep_ms: int) -> None: ...

    def find(self, xid: str, epoch: int = 0) -> Outcome | None:
        """The outcome of that very epoch of `xid`, or of its latest one for 0; None if it is not remembered."""
        ...
