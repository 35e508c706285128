"""`python -m tfmq.spark.pipelines [NAME ...]`: lists the pipelines, or runs the pipeline with this name."""

from __future__ import annotations

from types import MappingProxyType

import click

from tfmq.cli.main import LazyGroup
from tfmq.spark.pipelines import NAMES
from tfmq.spark.pipelines.command import HELP, run_and_exit


class Pipelines(LazyGroup):
    """Click group with a command for each pipeline. A pipeline's module is imported when its command is used."""

    targets = MappingProxyType({name: f"tfmq.spark.pipelines.{name}:{name}" for name in NAMES})


@click.group(
    cls=Pipelines,
    context_settings=HELP,
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.report orders --to /tmp/report",
)
def pipelines() -> None:
    """Whole pipelines over topics and their files, run by Spark."""


if __name__ == "__main__":
    run_and_exit(pipelines, "")
