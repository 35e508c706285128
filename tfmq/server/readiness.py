"""Telling the outside that the server accepts commands, or is about to stop: a line, and systemd's way."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TextIO


def say_ready(out: TextIO, address: str) -> None:
    """The one line on standard output that scripts wait for."""
    print(f"ready {address}", file=out, flush=True)


def notify_systemd(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send `state` ("READY=1", "STOPPING=1") where systemd asks for it; whether it was sent.

    The protocol of sd_notify(3): a datagram to the socket that NOTIFY_SOCKET names; "@" means an abstract
    one.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as there:
        try:
            there.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)
        except OSError:
            return False
    return True
