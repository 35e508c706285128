"""What is said where PySpark is missing or too old, and that Spark goes on without tfmq then."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tfmq.spark.requirements import missing, version


def pyspark(folder: Path, line: str) -> Path:
    """A pyspark that says of itself what `line` does."""
    (folder / "pyspark").mkdir()
    (folder / "pyspark" / "__init__.py").touch()
    (folder / "pyspark" / "version.py").write_text(line)
    return folder / "pyspark"


def spec(folder: Path) -> ModuleSpec:
    return ModuleSpec("pyspark", None, origin=str(folder / "__init__.py"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('__version__: str = "4.0.1"', (4, 0)),
        ('__version__ = "4.2.0.dev1"', (4, 2)),
        ("__version__ = '5.10.0'", (5, 10)),
        ("nothing", None),
    ],
)
def test_the_version_of_a_pyspark(tmp_path: Path, line: str, found: tuple[int, int] | None) -> None:
    assert version(pyspark(tmp_path, line)) == found
    assert version(tmp_path / "not there") is None


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    assert missing() is None
    assert missing(lambda _: None) == (
        "tfmq.spark needs pyspark, which is not installed: pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
    )
    there = spec(pyspark(tmp_path, '__version__ = "4.3.0"'))
    assert missing(lambda name: there if name == "pyspark" else None) == (
        "tfmq.spark needs pyarrow, which is not installed: pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
    )


@pytest.mark.parametrize(
    ("found", "wrong"), [("4.1.2", True), ("3.5.0", True), ("4.2.0", False), ("10.0.0", False)]
)
def test_an_old_pyspark_is_named(tmp_path: Path, found: str, wrong: bool) -> None:
    there = spec(pyspark(tmp_path, f'__version__ = "{found}"'))
    said = missing(lambda _: there)
    assert (said is not None) == wrong
    if wrong:
        number = found[:3]
        assert said == (
            f"tfmq.spark needs pyspark 4.2 or newer, and {number} is installed: pip install -U 'pyspark>=4.2'"
        )


def test_spark_finds_a_source_that_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.stdout == "said\n", done.stderr


PROGRAM = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pyarrow" else find_spec(name, *rest)

from pyspark.sql.types import StructType
from pyspark_tfmq import DefaultSource

assert DefaultSource.name() == "tfmq"
source = DefaultSource({})
for ask in (source.schema, lambda: source.reader(schema=StructType()), lambda: source.streamReader(schema=None)):
    try:
        ask()
    except ImportError as error:
        assert str(error).startswith("tfmq.spark needs pyarrow, which is not installed"), error
    else:
        raise AssertionError
print("said")
"""
