"""Which call fails, and how: the Nth of a kind, from a place on, or all of them; and which calls are slow.

Kinds: open, create, read, write, truncate, force, folder (make, remove), rename, unlink, force_folder, sync,
list, size, lock.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from journal.disk import FULL_ERRORS, NO_DESCRIPTOR_ERRORS
from journal.errors import Full

FORCES = frozenset({"force", "force_folder", "sync", "sync_file"})
KINDS = FORCES | {
    "create",
    "folder",
    "list",
    "lock",
    "open",
    "read",
    "rename",
    "size",
    "truncate",
    "unlink",
    "write",
}
OPENS = frozenset({"open", "create", "lock"})


@dataclass
class Fault:
    """One rule: calls `first` to `last` (from 1, from when the rule was made; None: for ever) fail."""

    kind: str
    first: int
    last: int | None
    error: int
    path: str
    short: int | None = None
    seen: int = 0
    hit: int = 0
    """How often it has struck."""

    def strikes(self, kind: str, path: str) -> bool:
        """Counts a call; True if it is one of those that fail."""
        if kind != self.kind or self.path not in path:
            return False
        self.seen += 1
        struck = self.first <= self.seen and (self.last is None or self.seen <= self.last)
        self.hit += struck
        return struck


class Faults:
    """The faults of one disk. Nothing fails until a rule is made."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Calls so far, by kind, failed ones too."""
        self.before: Callable[[str, str], None] | None = None
        """Called with kind and path before every call: a slow disk sleeps, waits or moves a clock here."""
        self._rules: list[Fault] = []

    def fail(
        self, kind: str, *, nth: int = 1, times: int | None = 1, error: int = errno.EIO, path: str = ""
    ) -> Fault:
        """From the `nth` call of `kind` on (whose path has `path` in it), `times` calls fail with `error`.

        A failed force of a file loses what it should have forced, and the next one says ok, as Linux does.
        `times=None`: all later ones fail. Raises `ValueError` for a kind of call that there is not.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no call of a disk: {', '.join(sorted(KINDS))}.")
        rule = Fault(kind, nth, None if times is None else nth + times - 1, error, path)
        self._rules.append(rule)
        return rule

    def short_write(self, size: int, *, nth: int = 1, times: int | None = 1, path: str = "") -> Fault:
        """The `nth` write takes only `size` bytes and says so."""
        rule = Fault("write", nth, None if times is None else nth + times - 1, 0, path, size)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Nothing fails any more."""
        self._rules.clear()

    def check(self, kind: str, path: str) -> int | None:
        """Counts a call; raises what it must fail with. A write gets the count of bytes to take, if it is
        short.
        """
        if self.before is not None:
            self.before(kind, path)
        self.counts[kind] += 1
        short: int | None = None
        for rule in self._rules:
            if rule.strikes(kind, path):
                if rule.short is None:
                    _raise(rule.error, kind, path)
                short = rule.short
        return short


def _raise(error: int, kind: str, path: str) -> None:
    if kind in FORCES:
        raise OSError(error, os.strerror(error), path)
    if error in FULL_ERRORS or (error in NO_DESCRIPTOR_ERRORS and kind in OPENS):
        raise Full(f"{path}: {os.strerror(error)}")
    raise OSError(error, os.strerror(error), path)
