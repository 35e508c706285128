"""Complete Spark jobs for topics, the pipelines: run them by `python -m tfmq.spark.pipelines.NAME` or spark-submit.

The reference is docs/pipelines.md.
"""

from typing import Final

NAMES: Final = ("archive", "replay", "audit", "reconcile", "report")
