"""The tutorial's Django transaction: its page can be followed, and it is exact where it is killed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfmq
from tests.scale import SEED, scaled
from tests.tutorial.pages import ROOT, Page

SECONDS = 110.0


@pytest.mark.long
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    Page("django.md", tmp_path).follow()


def shop(folder: Path) -> dict[str, str]:
    """The page's project without its reader; the environment of its programs."""
    page = Page("django.md", folder)
    commands = [text for language, _, text in page.blocks if language == "console"]
    page.run("django-admin startproject shop .")
    page.write()
    for line in "\n".join(commands).splitlines():
        if line.startswith("$ python manage.py m"):
            page.run(line[2:])
    return {**page.environment, "DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": f"{ROOT}:{folder}"}


@pytest.mark.long
def test_killed_at_any_line_both_are_there_or_neither(tmp_path: Path) -> None:
    settings = {"transaction.check_seconds": 0.2}
    with tfmq.local_server(tmp_path / "data", settings=settings) as servers:
        done = subprocess.run(
            [sys.executable, "-m", "tests.tutorial.crashes", str(scaled(400)), str(SEED)],
            cwd=tmp_path,
            env={**shop(tmp_path), "TFMQ_SERVERS": servers},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    said = re.search(r"^(\d+) killed, (\d+) of these orders are there", done.stdout, re.MULTILINE)
    assert said, done.stdout + done.stderr[-5000:]
    assert 0 < int(said[2]) < int(said[1]), said[0]
