"""The pytest plug-in, in test runs of its own."""

import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests import paths

ROOT = paths.ROOT

PASSING = """
import tfmq

def test_an_order_is_seen(tfmq_broker):
    with tfmq.Producer() as producer:
        producer.send("orders", "x", key="42").result()
    assert [message.key for message in tfmq_broker.sent("orders")] == ["42"]

def test_the_next_test_has_a_broker_of_its_own(tfmq_broker):
    assert tfmq_broker.sent("orders") == []
    tfmq_broker.clock.advance(hours=1)
    with tfmq.Consumer(topics="orders") as consumer:
        assert consumer.poll(timeout=5) == []
"""
UNUSED = """
import sys

def test_nothing_of_tfmq_is_loaded():
    loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("tfmq", "journal", "twisted", "msgpack"))
    assert loaded == ["tfmq", "tfmq.testing", "tfmq.testing.plugin"]
"""
FAILING = """
import tfmq

def test_a_failing_test_ends_its_broker_too(tfmq_broker):
    tfmq.Producer(linger_ms=1000).send("orders", "x")
    assert False, "as planned"

def test_the_next_one_goes_on(tfmq_broker):
    tfmq_broker.producer().send("orders", "x").result()
"""
REAL = """
import os, pytest, tfmq

seen = []

@pytest.mark.parametrize("word", ["a/b", "ü" * 300])
def test_a_real_broker_is_shared_and_a_topic_is_not(tfmq_server, tfmq_topic, word):
    with tfmq.Producer(tfmq_server) as producer:
        producer.send(tfmq_topic, "x").result()
    with tfmq.Consumer(tfmq_server, topics=tfmq_topic) as consumer:
        assert [message.text for message in consumer.poll(timeout=10)] == ["x"]
    seen.append((tfmq_server, tfmq_topic))

def test_both_were_on_one_broker_under_two_names(tfmq_broker):
    (first, second) = seen
    assert first[0] == second[0] != os.environ["TFMQ_SERVERS"] and first[1] != second[1]
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """A test run that knows the plug-in as an installed one is known, and nothing of ours besides."""
    (folder / "test_it.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tfmq.testing.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, f"--rootdir={folder}", "-c", os.devnull, str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TFMQ_SERVERS": "127.0.0.1:1",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.long
def test_it_is_found_where_tfmq_is_installed_and_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert 'tfmq.testing.plugin' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for options, word in (([], "1 failed"), (["-p", "no:tfmq"], "1 passed")):
        done = subprocess.run(
            [*command, *options],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert word in done.stdout, done.stdout + done.stderr


def test_each_test_has_a_broker_of_its_own_and_every_client_finds_it(tmp_path: Path) -> None:
    done = run(tmp_path, PASSING)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_nothing_is_imported_until_a_test_asks_for_a_broker(tmp_path: Path) -> None:
    done = run(tmp_path, UNUSED)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_real_server_may_be_had_too_one_for_the_whole_run(tmp_path: Path) -> None:
    done = run(tmp_path, REAL)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_failing_test_leaves_nothing_to_the_next_one(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "as planned" in done.stdout
    assert "not delivered when the program ended" not in done.stdout + done.stderr


def test_the_fixture_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "tfmq.testing.plugin", "--fixtures", "-c", os.devnull]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "tfmq_broker" in done.stdout and "the test moves the clock" in done.stdout


def test_the_package_registers_it_with_pytest() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "tfmq = tfmq.testing.plugin" in config["options.entry_points"]["pytest11"]
