"""For tests: a disk and a clock in memory, faults, and the states that a power cut could leave."""

from journal.testing.clock import SimulatedClock
from journal.testing.crash import Moment, crash_states
from journal.testing.faults import Faults
from journal.testing.simulated_disk import SimulatedDisk, SimulatedFile

__all__ = ["Faults", "Moment", "SimulatedClock", "SimulatedDisk", "SimulatedFile", "crash_states"]
