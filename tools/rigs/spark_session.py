"""How a Spark for tests and rigs is set up: small, quiet, on loopback, with the Python that the tests run with."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.rigs import java

ROOT = Path(__file__).resolve().parent.parent.parent
QUIET = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex
"""
JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"
"""A quick start, and little of a small machine."""


def missing() -> str | None:
    """What keeps Spark from running here, in a sentence; None if nothing does."""
    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("pyarrow") is None:
        return "pyspark and pyarrow are not installed (make setup)"
    if java.home() is None:
        return f"no Java from {java.RELEASE_MIN} on is installed (make system)"
    return None


def environment(folder: Path, *paths: Path) -> dict[str, str]:
    """What a process with a Spark in it needs; `paths`: what its Python workers can import besides the checkout."""
    home = java.home()
    assert home is not None
    return {
        "JAVA_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
    }


def settings(folder: Path, master: str = "local[2]") -> dict[str, str]:
    """The configuration of a session whose files are all in `folder`, which must be there."""
    log = folder / "log4j2.properties"
    log.write_text(QUIET)
    return {
        "spark.master": master,
        "spark.app.name": "tfmq-rig",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "700m",
        "spark.driver.extraJavaOptions": f"{JVM} -Dlog4j2.configurationFile={log} -Dderby.system.home={folder}",
        "spark.executor.extraJavaOptions": f"{JVM} -Dlog4j2.configurationFile={log}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.streaming.stopTimeout": "60s",
    }


def start(folder: Path, master: str = "local[2]", more: Mapping[str, str] | None = None) -> Any:
    """A SparkSession in this process, which must have none; the environment is changed for its workers."""
    os.environ.update(environment(folder))
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    for key, value in {**settings(folder, master), **(more or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
