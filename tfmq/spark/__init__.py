"""The Spark data source "tfmq": reads and writes topics, in batch and streaming queries.

    spark.read.format("tfmq").option("servers", "127.0.0.1:8367").option("subscribe", "orders").load()

Spark finds the data source through the module `pyspark_tfmq`; if Spark does not find it, call
`tfmq.spark.register(spark)`. The reference is docs/spark.md. Importing this package does not import PySpark, but raises
an ImportError that says what to install if PySpark is missing or too old.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

PYSPARK_MIN = (4, 2)
"""The first version in which a source in Python can limit micro-batches and support `Trigger.AvailableNow`."""
VERSION = re.compile(r"__version__[^\n=]*=\s*[\"'](\d+)\.(\d+)[^\"']*")


def missing_requirement(find: Callable[[str], ModuleSpec | None] = find_spec) -> str | None:
    """Return a sentence that names the missing requirement; None if all are installed. Imports none of them."""
    for name in ("pyspark", "pyarrow"):
        if find(name) is None:
            install = "pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
            return f"tfmq.spark needs {name}, which is not installed: {install}"
    spec = find("pyspark")
    assert spec is not None
    found = pyspark_version(Path(spec.origin or "").parent)
    if found is None or found >= PYSPARK_MIN:
        return None
    there = ".".join(map(str, found))
    return f"tfmq.spark needs pyspark 4.2 or newer, and {there} is installed: pip install -U 'pyspark>=4.2'"


def pyspark_version(folder: Path) -> tuple[int, int] | None:
    """Return the version of the pyspark in `folder`, like (4, 2); None if it cannot be read."""
    try:
        found = VERSION.search((folder / "version.py").read_text())
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None


if _sentence := missing_requirement():
    if sys.argv[:1] == ["-m"]:  # `python -m` imports this package before any code that could catch an exception
        sys.exit(f"tfmq: {_sentence}")
    raise ImportError(_sentence)


def register(spark: SparkSession) -> None:
    """Register the data source "tfmq" with `spark`. Calling it twice is harmless."""
    from tfmq.spark.source import TfmqSource

    spark.dataSource.register(TfmqSource)
