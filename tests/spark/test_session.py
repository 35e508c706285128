"""The Spark of the tests, and what is said where there is none."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import paths, scale
from tools.rigs import java, spark_session
from tools.rigs.live_server import LiveServer

ROOT = paths.ROOT
FAKES = {
    "java": 'echo "openjdk version \\"11.0.2\\" 2019-01-15" >&2',
    "id": "echo 0",
    "apt-cache": '[ "$2" = default-jre-headless ] && echo "  Candidate: 2:1.11-72" || echo "  Candidate: 21.0.1"',
    "apt-get": 'echo "$@" >>"$FAKE_LOG"',
}


def program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_the_session_is_a_small_one_on_loopback_with_our_python(spark: Any) -> None:
    conf = spark.sparkContext.getConf()
    assert spark.sparkContext.master == "local[2]"
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None

    def where(_: int) -> tuple[str, str]:
        return sys.executable, scale.__file__

    [(python, module)] = spark.sparkContext.parallelize([0], 1).map(where).collect()
    assert python == sys.executable
    assert Path(module).parent == ROOT / "tests"


def test_the_broker_of_a_module_answers(spark_server: LiveServer, topic: str) -> None:
    import tfmq

    with tfmq.Producer(spark_server.address) as producer:
        producer.send(topic, b"x").result(60)
    with tfmq.Consumer(spark_server.address, topics=topic) as consumer:
        assert [message.payload for message in consumer.poll(60.0)] == [b"x"]


def test_an_older_java_is_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old" / "bin" / "java", tmp_path / "new" / "bin" / "java"
    for path, version in ((old, "1.8.0_402"), (new, "21.0.1")):
        path.parent.mkdir(parents=True)
        program(path, f"echo 'openjdk version \"{version}\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setattr(java, "JVMS", tmp_path)
    java.home.cache_clear()
    try:
        assert java.release(old) == 1
        assert java.home() == tmp_path / "new"
        new.unlink()
        java.home.cache_clear()
        assert java.home() is None
        assert spark_session.missing() == "no Java from 17 on is installed (make system)"
    finally:
        monkeypatch.undo()
        java.home.cache_clear()


@pytest.mark.parametrize("release", ["11", "17"])
def test_the_set_up_brings_a_java_where_it_is_too_old(tmp_path: Path, release: str) -> None:
    for name, line in FAKES.items():
        program(tmp_path / name, line.replace("11.0.2", f"{release}.0.2"))
    log = tmp_path / "log"
    log.touch()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE_LOG": str(log)}
    environment.pop("JAVA_HOME", None)
    command = ["bash", str(ROOT / "tools" / "setup_system.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    asked = [word for line in log.read_text().splitlines() if "install" in line for word in line.split()]
    if release == "11":
        assert "openjdk-21-jre-headless" in asked, "the default of that Debian is Java 11"
        assert "default-jre-headless" not in asked
        assert "still older than Java 17" in done.stderr
    else:
        assert not any("jre" in word for word in asked)
