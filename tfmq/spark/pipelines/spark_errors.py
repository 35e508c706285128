"""What Spark's error says of ours: the sentence of a tfmq error that a task or a data source raised, as that error."""

from __future__ import annotations

import re
from typing import Final

from tfmq.errors import CLASSES, TfmqError

RAISED: Final = re.compile(r"(?:^\s*(?:[\w.]*\.)?|: tfmq\.[\w.]*)\b(\w+): (.+)$", re.MULTILINE)
"""A traceback's last line, as Python prints it, or what Spark says of a data source's error in front of it."""
BY_NAME: Final = {each.__name__: each for each in CLASSES}


def error_in(error: BaseException) -> TfmqError | None:
    """The tfmq error that is somewhere in the text of Spark's, the last one where there are several."""
    found = None
    for match in RAISED.finditer(str(error)):
        kind = BY_NAME.get(match[1])
        if kind is not None:
            found = kind(match[2].strip())
    return found


def reason_in(error: BaseException) -> str | None:
    """The first line of what Java's exception says, without its class; None where there is none."""
    java = getattr(error, "java_exception", None)
    if java is None:
        return None
    text = str(java.getMessage() or java.toString())
    return text.splitlines()[0] if text else None
