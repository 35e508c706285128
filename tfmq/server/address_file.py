"""DATA/address: where the broker that runs on a data folder listens, for clients that were given the folder.

One line, `HOST:PORT PROCESS`. It is there from "ready" until a clean stop begins; one that a kill left behind is told
by DATA/lock, which nobody, or a process of another number, holds.
"""

from __future__ import annotations

import logging
import os
from typing import Final

logger = logging.getLogger("tfmq.server")

NAME: Final = "address"


def write_address(data: str, address: str) -> None:
    """Say that this process listens at `address`. Readers see all of it or nothing. A disk that does not take it is
    logged: whoever knows the address still comes in."""
    path = os.path.join(data, NAME)
    beside = f"{path}.{os.getpid()}"
    try:
        with open(beside, "w", encoding="ascii") as file:
            file.write(f"{address} {os.getpid()}\n")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s could not be written, so file:%s does not find this broker: %s", path, data, error)


def remove_address(data: str) -> None:
    """Nobody shall come any more."""
    path = os.path.join(data, NAME)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
