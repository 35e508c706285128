"""A complete broker in the test's own process, for tests of programs that use tfmq.

The broker's disk is in memory, and the test moves the broker's clock. The fixture `tfmq_broker` of the pytest plug-in
creates a broker for each test; without pytest, use `SimulatedBroker`. Importing this package is cheap: its modules are
imported when one of its names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker as SimulatedBroker
    from tfmq.testing.clock import VirtualClock as VirtualClock
    from tfmq.testing.simulation import NothingComes as NothingComes


_DEFINED_IN = {
    "NothingComes": "tfmq.testing.simulation",
    "SimulatedBroker": "tfmq.testing.broker",
    "VirtualClock": "tfmq.testing.clock",
}

__all__ = ["NothingComes", "SimulatedBroker", "VirtualClock"]


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'tfmq.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
