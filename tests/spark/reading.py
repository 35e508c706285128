"""What tests of readers share: rows of all tasks, read in this process as tasks read them."""

import pickle
from collections.abc import Iterable
from typing import Any


def rows(reader: Any, tasks: Iterable[Any]) -> list[dict[str, Any]]:
    """All rows; reader and tasks travel as they do to executors."""
    found: list[dict[str, Any]] = []
    for task in tasks:
        there, part = pickle.loads(pickle.dumps((reader, task)))
        for batch in there.read(part):
            found += batch.to_pylist()
    return found


def values(found: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(row["value"].decode() for row in found)
