"""What a row of a benchmark is: figures with their targets, medians, percentiles."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `target` is what docs/performance.md promises; `least` says that more is better."""

    row: str
    who: str
    value: float
    unit: str
    target: float | None = None
    least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.least else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of `values`."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def alternately(runs: int, *programs: Callable[[], float]) -> list[list[float]]:
    """Run the programs in turn, `runs` times each, so that the machine's moods meet all of them alike."""
    results: list[list[float]] = [[] for _ in programs]
    for _ in range(runs):
        for program, values in zip(programs, results, strict=True):
            values.append(program())
    return results


def spread(values: Sequence[float]) -> str:
    return f"{min(values):,.3g} to {max(values):,.3g}"
