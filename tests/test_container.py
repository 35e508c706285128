"""conf/Containerfile and conf/compose.yml say what the product has. docs/containers.md says how the image was tried."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.paths import ROOT
from tfmq.config import load

CONTAINERFILE = (ROOT / "conf" / "Containerfile").read_text()


def arguments(command: str) -> list[str]:
    """The last ENTRYPOINT or CMD of that name, in its list form."""
    (found,) = re.findall(rf"^{command} (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    parsed: list[str] = yaml.safe_load(found)
    return parsed


def compose(name: str = "tfmq") -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((ROOT / "conf" / "compose.yml").read_text())["services"][name]
    return service


def test_the_image_is_built_from_files_that_are_there_and_has_all_that_a_wheel_needs() -> None:
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE) for name in line.split()
    ]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"setup.cfg", "pyproject.toml", "README.md", "journal", "tfmq", "pyspark_tfmq", "docs", "conf"} <= set(
        copied
    )


def test_the_image_runs_the_server_without_privileges_on_its_volume() -> None:
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE) == ["8367:8367"]
    program, option, data = arguments("ENTRYPOINT")
    assert (program, option) == ("tfmq-server", "--data")
    assert re.findall(r"^VOLUME (.*)$", CONTAINERFILE, re.MULTILINE) == [data]
    assert compose()["volumes"] == [f"data:{data}"]
    assert compose()["read_only"] and compose()["cap_drop"] == ["ALL"]


def test_the_configurations_are_accepted_and_their_ports_are_the_published_ones() -> None:
    listen = dict(zip(*[iter(arguments("CMD"))] * 2, strict=True))
    config = load(flags={"server.listen": listen["--listen"]})
    exposed = re.findall(r"^EXPOSE (.*)$", CONTAINERFILE, re.MULTILINE)[0].split()
    assert exposed == [config.server.listen.split(":")[1], config.http.listen.split(":")[1]]
    assert f"http://{config.http.listen}/live" in CONTAINERFILE
    given = dict(each.removeprefix("--").split("=", 1) for each in compose()["command"] if "--set=" not in each)
    sets = [each.removeprefix("--set=") for each in compose()["command"] if "--set=" in each]
    inside = load(flags={"server.listen": given.pop("listen")}, sets=sets)
    assert not given and inside.server.insecure
    published = [f"127.0.0.1:{port}:{port}" for port in exposed]
    assert compose()["ports"] == published, "only programs of this machine reach an insecure broker"


def test_prometheus_scrapes_the_broker_by_a_name_that_it_accepts() -> None:
    settings = yaml.safe_load((ROOT / "conf" / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert (
        f"--set=http.hosts={host}" in compose()["command"]
        and f"--set=http.listen=0.0.0.0:{port}" in compose()["command"]
    )
    assert f'up{{job="{job["job_name"]}"}}' in (ROOT / "conf" / settings["rule_files"][0]).read_text()
    mounted = [
        volume.partition(":")[0]
        for name in ("prometheus", "grafana")
        for volume in compose(name)["volumes"]
        if volume.startswith("./")
    ]
    assert len(mounted) == 5 and [path for path in mounted if not (ROOT / "conf" / path).is_file()] == []
