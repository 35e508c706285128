"""For tests of programs that use tfmq: a whole broker in the test's own process, on a disk in memory, with a clock that
the test moves.

The fixture `tfmq_broker` of the pytest plug-in gives each test one; without pytest, `SimulatedBroker` is the same.
Importing this loads nothing: what a name needs is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker as SimulatedBroker
    from tfmq.testing.clock import VirtualClock as VirtualClock
    from tfmq.testing.simulation import NothingComes as NothingComes

_PLACES = {
    "NothingComes": "tfmq.testing.simulation",
    "SimulatedBroker": "tfmq.testing.broker",
    "VirtualClock": "tfmq.testing.clock",
}

__all__ = ["NothingComes", "SimulatedBroker", "VirtualClock"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tfmq.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
