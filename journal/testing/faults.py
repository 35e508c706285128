"""Fault injection for a simulated disk: which calls fail, and how; and which calls are slow.

Kinds of calls: open, create, read, write, truncate, force, folder (make, remove), rename, unlink,
force_folder, sync, list, size, lock.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from journal.disk import FULL_ERRORS, NO_DESCRIPTOR_ERRORS
from journal.errors import Full

FSYNCS = frozenset({"force", "force_folder", "sync", "sync_file"})
KINDS = FSYNCS | {"create", "folder", "list", "lock", "open", "read", "rename", "size", "truncate", "unlink", "write"}
OPENS = frozenset({"open", "create", "lock"})


@dataclass
class FaultRule:
    """A rule by which calls of one kind fail: the calls `first` to `last`, counted from 1.

    Calls are counted since the rule was made. `last` None: all later ones.
    """

    kind: str
    first: int
    last: int | None
    error: int
    path: str
    short: int | None = None
    seen: int = 0
    hit: int = 0
    """Number of failed calls."""

    def matches(self, kind: str, path: str) -> bool:
        """Count a call of `kind` with `path`, if the rule is about such; True if it must fail."""
        if kind != self.kind or self.path not in path:
            return False
        self.seen += 1
        struck = self.first <= self.seen and (self.last is None or self.seen <= self.last)
        self.hit += struck
        return struck


class Faults:
    """The faults of one disk. Nothing fails until a rule is added."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of calls by kind, including failed ones."""
        self.before: Callable[[str, str], None] | None = None
        """Called with kind and path before every call: a slow disk sleeps, waits or advances a clock here."""
        self._rules: list[FaultRule] = []

    def fail(
        self, kind: str, *, nth: int = 1, times: int | None = 1, error: int = errno.EIO, path: str = ""
    ) -> FaultRule:
        """Let `times` calls of `kind` fail with `error`, from the `nth` on whose path contains `path`.

        A failed fsync of a file loses its data, and the next one succeeds, as on Linux. `times=None`: all
        later calls fail. Raises `ValueError` for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no call of a disk: {', '.join(sorted(KINDS))}.")
        rule = FaultRule(kind, nth, None if times is None else nth + times - 1, error, path)
        self._rules.append(rule)
        return rule

    def short_write(self, size: int, *, nth: int = 1, times: int | None = 1, path: str = "") -> FaultRule:
        """Let writes from the `nth` on accept only `size` bytes, and return that number."""
        rule = FaultRule("write", nth, None if times is None else nth + times - 1, 0, path, size)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Remove all rules."""
        self._rules.clear()

    def check(self, kind: str, path: str) -> int | None:
        """Count one call and raise the injected error, if any.

        For a short write, return how many bytes to accept.
        """
        if self.before is not None:
            self.before(kind, path)
        self.counts[kind] += 1
        short: int | None = None
        for rule in self._rules:
            if rule.matches(kind, path):
                if rule.short is None:
                    reason = os.strerror(rule.error)
                    full = FULL_ERRORS | NO_DESCRIPTOR_ERRORS if kind in OPENS else FULL_ERRORS
                    if rule.error in full and kind not in FSYNCS:
                        raise Full(f"{path}: {reason}")
                    raise OSError(rule.error, reason, path)
                short = rule.short
        return short
