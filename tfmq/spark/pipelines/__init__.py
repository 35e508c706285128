"""Whole pipelines over topics and their files: `python -m tfmq.spark.pipelines.NAME`, also under spark-submit.

docs/pipelines.md is the page.
"""

from typing import Final

NAMES: Final = ("archive", "replay", "audit", "reconcile", "report")
