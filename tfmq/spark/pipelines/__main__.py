"""`python -m tfmq.spark.pipelines`: the list of the pipelines, and each of them by its name."""

from tfmq.cli.main import main
from tfmq.spark.pipelines.listing import PROGRAM, pipelines

if __name__ == "__main__":
    main(None, pipelines, PROGRAM)
