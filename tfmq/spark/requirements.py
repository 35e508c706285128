"""Check whether the packages that tfmq.spark needs are installed.

This module imports none of them, so that a missing one can be reported as a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PYSPARK_MIN = (4, 2)
"""The first version that passes a source the limits of a micro-batch and the end of a query."""
VERSION = re.compile(r"__version__[^\n=]*=\s*[\"'](\d+)\.(\d+)[^\"']*")
INSTALL = "pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
UPGRADE = "pip install -U 'pyspark>=4.2'"


def missing(find: Callable[[str], ModuleSpec | None] = find_spec) -> str | None:
    """Return a sentence that names the missing requirement; None if all are installed.

    Does not import any of the packages.
    """
    for name in ("pyspark", "pyarrow"):
        if find(name) is None:
            return f"tfmq.spark needs {name}, which is not installed: {INSTALL}"
    spec = find("pyspark")
    assert spec is not None
    found = version(Path(spec.origin or "").parent)
    if found is not None and found < PYSPARK_MIN:
        is_there = ".".join(map(str, found))
        return f"tfmq.spark needs pyspark 4.2 or newer, and {is_there} is installed: {UPGRADE}"
    return None


def version(folder: Path) -> tuple[int, int] | None:
    """Return the version of the pyspark in `folder`, like (4, 2); None if it cannot be read."""
    try:
        found = VERSION.search((folder / "version.py").read_text())
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None
