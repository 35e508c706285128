"""The Java that Spark runs on: that of JAVA_HOME or of the PATH, or, where these are too old, one in /usr/lib/jvm."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

RELEASE_MIN = 17
JVMS = Path("/usr/lib/jvm")


def release(java: Path) -> int:
    """17 of "17.0.15", 1 of "1.8.0_402"; 0 for what is no java."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return 0
    found = re.search(r' version "(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else 0


def candidates() -> Iterator[Path]:
    """Programs that may be one, the best first."""
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found).resolve()
    yield from sorted(JVMS.glob("*/bin/java"))


@functools.cache
def home() -> Path | None:
    """What JAVA_HOME is to be; None where no Java is new enough."""
    for java in candidates():
        if java.exists() and release(java) >= RELEASE_MIN:
            return java.parent.parent
    return None
