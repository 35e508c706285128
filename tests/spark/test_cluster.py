"""On a cluster: executors that are JVMs of their own, to which nothing of the checkout is known, reach the broker over
the wire. docs/spark.md, "On a cluster", has the commands that these tests run.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import tfmq
from tests import paths
from tests.scale import FRACTION, SCALE, scaled
from tests.spark.drivers import differing, sent, stored
from tools.rigs import java, spark_session
from tools.rigs.live_server import LiveServer

ROOT = paths.ROOT
MASTER = "local-cluster[2,1,1024]"
ROWS = 100_000
SECONDS = 540.0


def spark_home(folder: Path) -> Path:
    """pyspark's own folder with another place for what executors write, which would be inside of it else."""
    import pyspark

    home = folder / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def submit(folder: Path, python: str, *options: str, job: tuple[str, ...]) -> Any:
    """What the job prints last, run by spark-submit from an empty folder, without a PYTHONPATH."""
    home, somewhere = spark_home(folder), folder / "somewhere"
    somewhere.mkdir(exist_ok=True)
    settings = spark_session.settings(somewhere, MASTER)
    home_of_java = java.home()
    assert home_of_java is not None
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(somewhere),
        "JAVA_HOME": str(home_of_java),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
    }
    command = [str(home / "bin" / "spark-submit"), "--master", MASTER]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    program = shutil.copy(Path(__file__).parent / "cluster_job.py", somewhere)
    done = subprocess.run(
        [*command, *options, str(program), *job],
        cwd=somewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("\tat ", "  at "))]
    assert done.returncode == 0, "\n".join(said)[:6000]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def wanted(spark_can_be_had: None, spark_server: LiveServer, topic: str) -> Iterator[list[str]]:
    """The arguments of the job; after the test its output is compared with its input."""
    with tfmq.Admin(spark_server.address) as admin:
        for name in (f"{topic}-in", f"{topic}-out"):
            admin.create_topic(name, 2)
    rows = sent(spark_server.address, f"{topic}-in", max(500, scaled(ROWS)))
    yield [spark_server.address, f"{topic}-in", f"{topic}-out"]
    assert differing(stored(spark_server.address, f"{topic}-out"), rows) == {}


def check(said: Any, folder: Path, name: str) -> None:
    """Two executors had a tfmq that came with the job, and a folder of their own."""
    assert said["rows"] == max(500, scaled(ROWS))
    assert len({process for *_, process in said["where"]}) == 2, "two executors"
    for _, module, _, place, _, _ in said["where"]:
        assert name in module and str(ROOT) not in module, module
        assert str(folder / "spark-home" / "work") in place, place


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_executors_with_a_zip_of_the_packages_copy_a_topic(wanted: list[str], tmp_path: Path) -> None:
    archive = tmp_path / "tfmq.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for package in ("journal", "tfmq", "pyspark_tfmq"):
            for path in (ROOT / package).rglob("*.py"):
                written.write(path, path.relative_to(ROOT))
    job = (*wanted, str(tmp_path / "checkpoint"))
    said = submit(tmp_path, sys.executable, "--py-files", str(archive), job=job)
    check(said, tmp_path, "tfmq.zip")


# A whole environment, as it is taken to machines that have nothing but Python


def needed(name: str, found: set[str]) -> set[str]:
    """The distribution and all that it wants, those of its extra too."""
    for each in map(Requirement, importlib.metadata.requires(name) or []):
        wanted_here = each.marker is None or each.marker.evaluate({"extra": ""})
        if wanted_here and each.name.lower() not in found:
            found.add(each.name.lower())
            needed(each.name, found)
    return found


def environment(folder: Path) -> Path:
    """A virtual environment with the wheel and what it needs, packed."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(copied(folder))],
        check=True,
        timeout=SECONDS,
    )
    [wheel] = folder.glob("tfmq-*.whl")
    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=SECONDS)
    [packages] = place.glob("lib/python*/site-packages")
    for name in needed("tfmq", {"pyarrow", "numpy"}):
        for file in importlib.metadata.files(name) or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.exists():
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    packed = folder / "environment.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as written:
        written.add(place, ".")
    shutil.rmtree(place)
    return packed


def copied(folder: Path) -> Path:
    """The sources alone: building a wheel leaves things beside them."""
    place = folder / "sources"
    place.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    for name in ("journal", "tfmq", "pyspark_tfmq"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.mark.timeout(900)
@pytest.mark.skipif(SCALE <= FRACTION, reason="cannot be had here: under the full counts only, it packs 300 MB")
def test_executors_with_a_packed_environment_copy_a_topic(wanted: list[str], tmp_path: Path) -> None:
    packed = environment(tmp_path)
    with tarfile.open(packed) as opened:  # the driver's own parts run in it, too
        opened.extractall(tmp_path / "somewhere" / "environment")
    job = (*wanted, str(tmp_path / "checkpoint"))
    said = submit(tmp_path, "./environment/bin/python", "--archives", f"{packed}#environment", job=job)
    check(said, tmp_path, "environment/lib")
    assert all("environment" in python for _, _, python, *_ in said["where"])
    assert all("environment" in arrow for *_, arrow, _ in said["where"])
