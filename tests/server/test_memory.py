"""Freed memory stays with a working server, and goes back when it is told to."""

import subprocess
import sys

PROGRAM = """
import resource
from tfmq.server import server as memory
if not memory.retain_freed_memory():
    print(0, 0, 0)
    raise SystemExit
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(4 << 20)
before = faults()
for _ in range(100):
    bytearray(4 << 20)
churned = faults() - before
print(1, churned, int(memory.return_free_memory()))
"""


def test_freed_buffers_are_used_again_without_a_fault_until_they_are_given_back() -> None:
    command = [sys.executable, "-c", PROGRAM]
    kept, faults, gave = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
    if kept:  # glibc
        assert faults < 1024, "100 buffers of 4 MiB have 102,400 pages"
        assert gave
