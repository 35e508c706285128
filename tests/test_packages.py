"""Wheel and source archive: what is in them, that they install without a compiler, and that what is installed runs."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import ROOT

BUILD_SECONDS = 100.0
RUN_SECONDS = 60.0
SOURCE_ONLY = {"crcmod"}
"""The dependencies without wheels. crcmod installs as pure Python where there is no compiler."""
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64")


class Built(NamedTuple):
    """The two packages of this checkout."""

    wheel: Path
    source: Path


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The packages, built from the tracked files: the wheel from the unpacked source archive, without network."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("packages")
    for name in tracked():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(sources)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, source)


def test_setup_cfg_names_every_file_that_is_not_python() -> None:
    """Without a build, so that a new file that nobody added to setup.cfg is found at once."""
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    patterns = [pattern.strip() for text in found["options.data_files"].values() for pattern in text.split(",")] + [
        f"{package}/{pattern.strip()}"
        for package, text in found["options.package_data"].items()
        for pattern in text.split(",")
    ]
    named = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    texts = tracked("docs", "conf", "examples/*.md", "*.md") - tracked("tests", "tools")
    data = {name for name in tracked("tfmq", "journal", "pyspark_tfmq") if not name.endswith(".py")}
    assert "tfmq/py.typed" in data and "docs/README.md" in texts
    assert sorted((texts | data) - named) == []


@pytest.mark.long
def test_the_packages_have_every_file_of_the_product_its_docs_and_its_configuration(built: Built) -> None:
    assert built.wheel.name.endswith("-py3-none-any.whl"), "nothing is compiled"
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name.partition("/data/share/doc/tfmq/")[2] or name for name in wheel.namelist()}
    product = tracked("tfmq", "journal", "pyspark_tfmq")
    assert len(product) > 200 and "tfmq/py.typed" in product
    assert sorted(product - names) == []
    assert sorted(tracked("docs", "conf") - names) == []
    with tarfile.open(built.source) as source:
        members = {member.name.partition("/")[2] for member in source}
    assert sorted({*product, *tracked("docs", "conf"), "setup.cfg", "pyproject.toml", "LICENSE"} - members) == []


def run(program: Path, *arguments: str, servers: str = "") -> str:
    environment = {"PATH": str(program.parent), "HOME": str(program.parent)}
    if servers:
        environment["TFMQ_SERVERS"] = servers
    ended = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        cwd=program.parent,
        env=environment,
    )
    assert ended.returncode == 0, ended
    return ended.stdout


def send_and_read(programs: Path, data: Path) -> None:
    """Start the installed server, send and read with the installed command line, and stop it."""
    server = subprocess.Popen(
        [str(programs / "tfmq-server"), "--data", str(data), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=programs,
        env={"PATH": str(programs)},
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        run(programs / "tfmq", "send", "orders", "hello", servers=address)
        assert run(programs / "tfmq", "read", "orders", servers=address) == "hello\n"
        server.terminate()
        assert server.wait(RUN_SECONDS) == 0
    finally:
        server.kill()
        server.wait(RUN_SECONDS)


@pytest.mark.long
def test_the_installed_wheel_runs_and_finds_its_docs(built: Built, tmp_path: Path) -> None:
    """In a new environment, which takes the dependencies from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv/bin"
    (installed,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    install = ["-m", "pip", "--python", str(programs / "python"), "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([sys.executable, *install, str(built.wheel)], check=True, timeout=BUILD_SECONDS)
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(programs / "python", "-c", "import tfmq, journal; print(tfmq.__file__, journal.__file__)")
    assert where.split() == [str(installed / "tfmq/__init__.py"), str(installed / "journal/__init__.py")]
    shared = Path(run(programs / "tfmq", "--docs").strip())
    assert shared.is_relative_to(tmp_path)
    assert (shared / "docs/operations.md").is_file() and (shared / "conf/tfmq.service").is_file()
    send_and_read(programs, tmp_path / "data")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_installs_with_its_dependencies_without_a_compiler(built: Built, tmp_path: Path) -> None:
    """From the package index, on x86-64 or whatever this is, with no program but Python in the PATH."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv/bin"
    environment = {**os.environ, "PATH": str(programs)}
    report = tmp_path / "report.json"

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS * 3, env=environment)

    done = pip("install", "--no-cache-dir", "--report", str(report), str(built.wheel))
    if "NewConnectionError" in done.stderr or "NameResolutionError" in done.stderr:
        pytest.skip("cannot be had here: no package index can be reached")
    assert done.returncode == 0, done.stderr
    files = {
        found["metadata"]["name"]: (found["metadata"]["version"], found["download_info"]["url"])
        for found in json.loads(report.read_text())["install"]
    }
    assert {"Twisted", "msgpack", "crcmod"} <= set(files)
    assert {name for name, (_, url) in files.items() if not url.endswith(".whl")} == SOURCE_ONLY
    send_and_read(programs, tmp_path / "data")
    wanted = [f"{name}=={version}" for name, (version, _) in files.items() if name not in {*SOURCE_ONLY, "tfmq"}]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    other = pip("download", "--no-deps", "--only-binary", ":all:", *platforms, "-d", str(tmp_path / "other"), *wanted)
    assert other.returncode == 0, other.stderr
