"""`python -m tfmq.spark.pipelines [NAME ...]`: lists the pipelines, and runs each by its name."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

import click

from tfmq.cli.main import LazyGroup
from tfmq.spark.pipelines import NAMES
from tfmq.spark.pipelines.command import HELP, run_and_exit


class Pipelines(LazyGroup):
    """Click group with a command for each pipeline, imported from its module when it is used."""

    targets = MappingProxyType({name: f"tfmq.spark.pipelines.{name}" for name in NAMES})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.targets:
            return None
        found = vars(import_module(self.targets[name])).values()
        return next(each for each in found if isinstance(each, click.Command))


@click.group(
    cls=Pipelines,
    context_settings=HELP,
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.report orders --to /tmp/report",
)
def pipelines() -> None:
    """Whole pipelines over topics and their files, run by Spark."""


if __name__ == "__main__":
    run_and_exit(pipelines, "")
