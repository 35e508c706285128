"""Running one test of pytest's again: the only place that touches what pytest keeps to itself.

pytest has no public way to run a test twice. What is used here is what pytest-rerunfailures and others build on, too;
tried with pytest 8.0, 8.4, 9.0 and 9.2. A pytest without it is told by name, see `check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

try:
    from _pytest.runner import call_and_report as _call_and_report
except ImportError:  # pragma: no cover - said by `check`
    _call_and_report = None  # type: ignore[assignment]

NEEDED: Final = ("_initrequest", "_request", "_report_sections", "funcargs")
"""What a test function has: its request for fixtures, made anew for each run, and what the last run had printed."""
STRICT: Final = "[XPASS(strict)]"


def lacking(item: Any) -> list[str]:
    """What this version of pytest lacks of all this."""
    missing: list[str] = [] if _call_and_report is not None else ["_pytest.runner.call_and_report"]
    return missing + [f"Function.{name}" for name in NEEDED if not hasattr(item, name)]


def check(item: Any) -> None:
    """Fails the test if it cannot be run again with this pytest."""
    if missing := lacking(item):
        pytest.fail(
            f"This pytest ({pytest.__version__}) cannot run {item.name} again: it has no {', '.join(missing)}."
            " @pytest.mark.tfmq_faults is for tests that are functions or methods, with pytest 8 or 9.",
            pytrace=False,
        )


@contextmanager
def fresh(item: Any) -> Iterator[None]:
    """`item` may be run inside, as if it had never been."""
    item._report_sections.clear()
    if not item._request:
        item._initrequest()
    try:
        yield
    finally:
        item._request = False
        item.funcargs = None


class Run:
    """What pytest said of one run of `item`: its set-up and its call are made at once, `tear_down` ends it."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self.setup: Any = _call_and_report(item, "setup", log=False)
        self.call: Any = _call_and_report(item, "call", log=False) if self.setup.passed else None
        self.teardown: Any = None

    def tear_down(self, nextitem: Any) -> None:
        """The end of the run; what `nextitem` needs, too, stays."""
        self.teardown = _call_and_report(self._item, "teardown", log=False, nextitem=nextitem)

    def all(self) -> list[Any]:
        """The reports, in order."""
        return [report for report in (self.setup, self.call, self.teardown) if report is not None]

    @property
    def passed(self) -> bool:
        """Whether the test itself did well, also where its xfail mark says that it must not."""
        return self.call is not None and all(each.passed or _is_strict(each) for each in self.all())

    def failure(self) -> Any | None:
        """The first report of something that went wrong, expected or not."""
        found = (each for each in self.all() if each.failed or (each.skipped and hasattr(each, "wasxfail")))
        return next((each for each in found if not _is_strict(each)), None)


def _is_strict(report: Any) -> bool:
    """It passed, and its xfail mark does not allow that."""
    return report.failed and isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT)
