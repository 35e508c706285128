"""For tests: a simulated disk and clock, injected faults, and the states after a power loss."""

from journal.clock import SimulatedClock
from journal.testing.faults import Faults
from journal.testing.memory_disk import Moment, SimulatedDisk, SimulatedFile, crash_states

__all__ = ["Faults", "Moment", "SimulatedClock", "SimulatedDisk", "SimulatedFile", "crash_states"]
