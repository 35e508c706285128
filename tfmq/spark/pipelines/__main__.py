"""`python -m tfmq.spark.pipelines`: the list of the pipelines, and each of them by its name."""

from tfmq.spark.pipelines.command import leave
from tfmq.spark.pipelines.listing import pipelines

if __name__ == "__main__":
    leave(pipelines, "")
