"""Whole pipelines over topics and their files: `python -m tfmq.spark.pipelines.NAME`, also under spark-submit."""
