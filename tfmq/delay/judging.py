"""What can be said of one delayed message now: cancelled, delivered, pending or unknown; or that one must wait."""

from collections.abc import Callable
from typing import Final

from tfmq.apply_target import Destination
from tfmq.delay.arrival_state import ArrivalState
from tfmq.delay.broker_time import BrokerTime
from tfmq.delay.lines import Lines
from tfmq.delay.requests import CANCELLED, DELIVERED, PENDING, UNKNOWN, Turn
from tfmq.errors import UNKNOWN as OUTCOME_UNKNOWN
from tfmq.errors import StorageStopped

UNSURE: Final = "unsure"
"""It is being fired: its line's `settling` knows when to ask again."""
WAITS_FOR_SPACE: Final = "the end of its partition waits for space to be made durable"


class Judge:
    """See the module. `floor()`: nothing that is pending is due before."""

    def __init__(
        self,
        state: ArrivalState,
        lines: Lines,
        destination: Destination,
        time: BrokerTime,
        outcome_ms: int,
        floor: Callable[[], int],
    ) -> None:
        self._state, self._lines, self._destination, self._time = state, lines, destination, time
        self._outcome_ms, self._floor = outcome_ms, floor

    def state(self, key: int, turn: Turn, number_next: int) -> str:
        """PENDING, CANCELLED, DELIVERED, UNKNOWN or UNSURE; numbers from `number_next` on do not exist.

        Raises StorageStopped: only its target's log could tell, which takes nothing at the moment.
        """
        if turn.number >= number_next:
            return UNKNOWN
        if turn in self._state.cancelled:
            return CANCELLED
        if self._destination.name(key) is None:
            return UNKNOWN
        line = self._lines.get(key)
        if line is not None and line.fires(turn):
            if line.parked:
                raise StorageStopped(reason=line.parked, outcome=OUTCOME_UNKNOWN)
            return UNSURE
        through = self._lines.settled(key)
        now = self._time.now_ms()
        if through is not None and turn <= through:
            return DELIVERED if turn.due > now - self._outcome_ms else UNKNOWN
        if line is None and turn.due <= now:
            self._refuse_doubt(key, turn, through)
        # No file has it any more, and it was not delivered: it was cancelled so long ago that this is forgotten.
        return PENDING if turn.due >= self._floor() else UNKNOWN

    def _refuse_doubt(self, key: int, turn: Turn, through: Turn | None) -> None:
        """Where a partition could not be opened, nobody knows what it has; nor whether it keeps what is written and not
        on the disk for sure. Raises StorageStopped.
        """
        applied = self._destination.applied(key, self._lines.source)
        in_doubt = applied is not None and turn <= applied
        stopped = self._lines.stop_of(key)
        if stopped is not None and (in_doubt or through is None):
            raise stopped
        if in_doubt:
            raise StorageStopped(reason=WAITS_FOR_SPACE, outcome=OUTCOME_UNKNOWN)
