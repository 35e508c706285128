"""What the bare disk does on this machine, measured beside the rows that depend on it."""

import os
import tempfile
import time
from pathlib import Path


def sequential_mb_per_second(group_bytes: int, total_bytes: int, folder: Path) -> float:
    """write + fdatasync of groups of `group_bytes` in one new file of `folder`: MB a second."""
    data, groups = os.urandom(group_bytes), max(1, total_bytes // group_bytes)
    with tempfile.NamedTemporaryFile(prefix="tfmq-bench-", dir=folder) as file:
        begun = time.perf_counter()
        for _ in range(groups):
            os.write(file.fileno(), data)
            os.fdatasync(file.fileno())
        return groups * group_bytes / 1e6 / (time.perf_counter() - begun)


def force_seconds(size_bytes: int, count: int, folder: str = ".") -> list[float]:
    """The time of each of `count` appends of `size_bytes` to a new file in `folder`, forced one by one."""
    data, times = os.urandom(size_bytes), []
    with tempfile.NamedTemporaryFile(prefix="tfmq-bench-", dir=folder) as file:
        for _ in range(count):
            begun = time.perf_counter()
            os.write(file.fileno(), data)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return times
