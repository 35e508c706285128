"""What a coordinator asks of ZooKeeper: a handful of requests, which anything can answer that keeps such nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node as it was found or made: `session` 0: it stays when nobody lives · `created`: a number that grows with
    every change of anything, so of two makers of a node the later one has the higher.
    """

    data: bytes
    session: int
    created: int
    version: int


class Children(NamedTuple):
    """The names below `path`, [] where there is no such node; a change of them is told once."""

    path: str


class Read(NamedTuple):
    """The `Node` at `path`, None where there is none; its end, or its making, is told once."""

    path: str


class ReadAll(NamedTuple):
    """The `Node`s, or None, at each of `paths`; nothing is told later."""

    paths: Sequence[str]


class Create(NamedTuple):
    """Make a node that lives as long as the session, with all above it: the `Node`; None: there is one."""

    path: str
    data: bytes


class Write(NamedTuple):
    """Give a node new data: True; False: there is none."""

    path: str
    data: bytes


class Delete(NamedTuple):
    """Remove the node if it has this version, and there is one at `beside`: True, also if it is not there; False: it
    was left alone.
    """

    path: str
    version: int
    beside: str


Request = Children | Read | ReadAll | Create | Write | Delete
CHANGES = (Create, Write, Delete)
"""Those that the leader of the ensemble answers: only they prove that the session lives."""


class Cut(Exception):
    """The connection broke, or the session ended, before the answer: it may have been done."""
