"""What `import tfmq` gives, and what it does not load."""

import importlib
import subprocess
import sys

import tfmq

HEAVY = (
    "twisted",
    "sqlalchemy",
    "click",
    "rich",
    "apscheduler",
    "msgpack",
    "asyncio",
    "socket",
    "numpy",
    "tfmq.producer",
    "tfmq.server",
)


OF_SPARK = {"pyspark", "pyarrow", "numpy", "matplotlib", "tfmq.arrow", "tfmq.spark"}
COMMANDS = """
import importlib, pkgutil, sys
import tfmq.cli, tfmq.server
for package in (tfmq.cli, tfmq.server):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name in tfmq.__all__:
    getattr(tfmq, name)
"""
"""Every command and all that the broker is, and every public name."""


def loaded_by(program: str) -> set[str]:
    printed = f"{program}\nimport sys\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", printed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_it_loads_nothing_but_itself() -> None:
    assert loaded_by("import tfmq").isdisjoint(HEAVY)


def test_a_producer_loads_no_server_and_no_event_loop() -> None:
    loaded = loaded_by("import tfmq; tfmq.Producer()")
    assert loaded.isdisjoint({"twisted", "sqlalchemy", "click", "asyncio", "tfmq.broker", "tfmq.server"})


def test_nothing_but_the_pipeline_loads_what_the_pipeline_needs() -> None:
    loaded = loaded_by(COMMANDS)
    assert {"tfmq.cli.main", "tfmq.server.main", "tfmq.producer"} <= loaded
    assert loaded.isdisjoint(OF_SPARK)


def test_every_public_name_is_there() -> None:
    for name in tfmq.__all__:
        assert getattr(tfmq, name) is not None
    assert set(tfmq.__all__) == set(dir(tfmq))


def test_every_error_is_public() -> None:
    errors = importlib.import_module("tfmq.errors")
    assert {each.__name__ for each in errors.CLASSES} <= set(tfmq.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    assert not hasattr(tfmq, "Produce")
