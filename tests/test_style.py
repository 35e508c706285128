"""The few style rules that a test holds: module docstrings, deferred work, which package may import which library."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("journal", "tfmq", "pyspark_tfmq", "tools")


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.long
def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(p)
        for p in sources(*PACKAGES)
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


DEFERRED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|assert True\b|raise NotImplementedError")


def test_nothing_is_put_off() -> None:
    marks = [
        f"{name_of(path)}:{number}"
        for path in sources(*PACKAGES, "tests")
        if path.name != "test_style.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DEFERRED.search(line)
    ]
    assert marks == []


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


# Which folders may import a library; everything else may not.
ONLY_FOR = {
    "twisted": (
        "tfmq/server/",
        "tfmq/twisted",
        "tfmq/client/drivers/twisted.py",
        "tfmq/client/worker/twisted_runner.py",
        "tfmq/testing/twisted_driver.py",
        "tools/",
    ),
    "socket": (
        "tfmq/server/",
        "tfmq/client/",
        "tfmq/replication/stores/sql_store.py",
        "tfmq/embedded.py",
        "tfmq/tls.py",
        "tools/",
    ),
    "ssl": ("tfmq/tls.py", "tfmq/server/", "tfmq/client/connection/tls.py", "tfmq/client/drivers/socket.py"),
    "asyncio": ("tfmq/client/", "tfmq/aio", "tfmq/sql/", "tfmq/cli/delay.py", "tfmq/testing/drivers.py", "tools/"),
    "rich": ("tfmq/cli/", "tfmq/spark/pipelines/", "tools/"),
    "click": ("tfmq/cli/", "tfmq/server/main.py", "tfmq/spark/pipelines/", "tools/"),
    "pyspark": ("tfmq/spark/", "pyspark_tfmq/", "tools/"),
    "pyarrow": ("tfmq/arrow/", "tfmq/spark/", "tfmq/client/send/columns", "tfmq/client/consumer/columns", "tools/"),
    "numpy": ("tfmq/arrow/", "tfmq/spark/", "tools/"),
    "matplotlib": ("tfmq/spark/pipelines/", "tools/"),
    "obstore": ("tfmq/replication/stores/object_store.py", "tools/"),
    "pickle": (),
    "marshal": (),
}


@pytest.mark.long
def test_libraries_stay_where_they_belong() -> None:
    strays = [
        f"{name_of(path)} imports {module}"
        for path in sources(*PACKAGES)
        for module in imports(path)
        for library, folders in ONLY_FOR.items()
        if module.split(".")[0] == library and not name_of(path).startswith(folders)
    ]
    assert strays == []


def test_only_the_pipelines_know_the_command_line() -> None:
    strays = [
        f"{name_of(path)} imports {module}"
        for path in sources("tfmq/spark")
        if not name_of(path).startswith("tfmq/spark/pipelines/")
        for module in imports(path)
        if f"{module}.".startswith(("tfmq.cli.", "tfmq.testing.", "tfmq.spark.pipelines."))
    ]
    assert strays == []
