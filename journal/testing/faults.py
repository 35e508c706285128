"""Fault injection for a simulated disk: rules that let calls fail, and a hook that can make calls slow.

Kinds of calls: open, create, read, write, truncate, force, folder (make or remove one), rename, unlink, force_folder,
sync, sync_file (one file of a sync), list, size, lock.
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
    """A rule: calls of `kind` whose path contains `path` fail, from number `first` (1 is the first) to `last`.

    `last` None: all calls from `first` on fail. `short`: if not None, the writes do not fail, but accept only this
    number of bytes. `seen`: number of calls with this kind and path; `hit`: how many of these failed or were short.
    """

    kind: str
    first: int
    last: int | None
    error: int
    path: str
    short: int | None = None
    seen: int = 0
    hit: int = 0

    def matches(self, kind: str, path: str) -> bool:
        """Count a call if its kind and path match the rule. Return True if this call must fail or be short."""
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
        """Called with kind and path before every call. To simulate a slow disk, let it sleep or advance a clock."""
        self._rules: list[FaultRule] = []

    def fail(
        self, kind: str, *, nth: int = 1, times: int | None = 1, error: int = errno.EIO, path: str = ""
    ) -> FaultRule:
        """Let `times` calls of `kind` fail with `error`, from the `nth` such call on. `times` None: without limit.

        Only calls whose path contains `path` count. As on Linux, a failed fsync of a file loses its data, and the next
        fsync succeeds. Raises `ValueError` for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no call of a disk: {', '.join(sorted(KINDS))}.")
        rule = FaultRule(kind, nth, None if times is None else nth + times - 1, error, path)
        self._rules.append(rule)
        return rule

    def short_write(self, size: int, *, nth: int = 1, times: int | None = 1, path: str = "") -> FaultRule:
        """Let `times` writes, from the `nth` on, accept only `size` bytes: `pwritev` then returns this number."""
        rule = FaultRule("write", nth, None if times is None else nth + times - 1, 0, path, size)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        self._rules.clear()

    def check(self, kind: str, path: str) -> int | None:
        """Count a call. Raise the error that a rule demands. Return how many bytes a short write accepts, else None."""
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
