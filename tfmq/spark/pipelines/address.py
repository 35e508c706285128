"""Which broker, or whose data folder, a pipeline reads: options and what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tfmq.cli.values import Duration
from tfmq.client.connection.connection import SECONDS
from tfmq.errors import BadRequest
from tfmq.spark.logs import Address


def address_options(command: Any) -> Any:
    """--servers, --path, --timeout."""
    for option in (
        click.option(
            "--timeout",
            type=Duration(),
            default=SECONDS,
            show_default=True,
            help="How long a broker that is away is waited for.",
        ),
        click.option(
            "--path",
            metavar="DATA",
            type=click.Path(path_type=Path),
            help="Read the files of this data folder instead of asking a broker.",
        ),
        click.option(
            "--servers",
            metavar="HOST:PORT",
            help="The broker's address [$TFMQ_SERVERS, else 127.0.0.1:8367].",
        ),
    ):
        command = option(command)
    return command


def address_of(servers: str | None, path: Path | None, timeout: float) -> Address:
    """Raises BadRequest where both are named."""
    if path is not None:
        if servers is not None:
            raise BadRequest("Name either --servers or --path, not both.")
        return Address(None, str(path.resolve()), timeout)
    return Address(broker_of(servers), None, timeout)


def broker_of(servers: str | None) -> str:
    """What is meant where none is named; tasks elsewhere have another environment, so it is settled here."""
    return servers or os.environ.get("TFMQ_SERVERS") or "127.0.0.1:8367"
