"""How many steps of Python something takes: what costs none for a message takes the same for any number of them."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(act: Callable[[], Any]) -> int:
    """Lines that are run while `act` does: of its own, so no garbage is collected meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
