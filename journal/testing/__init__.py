"""For tests: a disk and a clock in memory, faults, and the states that a power cut could leave."""

from journal.clock import SimulatedClock
from journal.testing.faults import Faults
from journal.testing.memory_disk import Moment, SimulatedDisk, SimulatedFile, crash_states

__all__ = ["Faults", "Moment", "SimulatedClock", "SimulatedDisk", "SimulatedFile", "crash_states"]
