"""The few rules of the house that a test holds: sizes, mirrored tests, words, where imports may point.

The lists of exceptions may only shrink: a name that no longer needs its exception fails the test too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("journal", "tfmq", "pyspark_tfmq", "tools")
FUNCTION_LINES = 60
FILE_LINES = 400

LONG_FUNCTIONS: set[str] = set()
LONG_FILES: set[str] = set()
# A module whose tests stand elsewhere, and where.
TESTED_ELSEWHERE: dict[str, str] = {}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{name_of(path)}:{node.name}", node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_screen() -> None:
    found = {
        name
        for path in sources(*PACKAGES, "tests")
        for name, lines in functions(path)
        if lines > FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS


def test_no_file_is_longer_than_one_noun_needs() -> None:
    found = {name_of(p) for p in sources(*PACKAGES) if len(p.read_text().splitlines()) > FILE_LINES}
    assert found == LONG_FILES


def mirrored(path: Path) -> Path:
    """journal/log.py -> tests/journal/test_log.py; the tfmq level is left out; tools/x.py -> tests/tools/test_x.py."""
    parts = list(path.relative_to(ROOT).parts)
    if parts[0] == "tfmq":
        parts = parts[1:]
    return ROOT.joinpath("tests", *parts[:-1], f"test_{parts[-1]}")


def test_every_module_has_its_mirrored_test_file() -> None:
    modules = [p for p in sources("journal", "tfmq") if p.name not in ("__init__.py", "__main__.py")]
    missing = {name_of(p) for p in modules if not mirrored(p).exists()}
    assert missing == set(TESTED_ELSEWHERE)
    for module, elsewhere in TESTED_ELSEWHERE.items():
        assert (ROOT / elsewhere).exists(), f"{module} says that {elsewhere} tests it, and that is not there"


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
        "tfmq/client/run_deferreds.py",
        "tfmq/testing/deferred.py",
        "tools/",
    ),
    "socket": ("tfmq/server/", "tfmq/client/", "tfmq/local.py", "tools/"),
    "asyncio": ("tfmq/client/", "tfmq/aio", "tfmq/sql/", "tfmq/cli/delay.py", "tools/"),
    "rich": ("tfmq/cli/", "tfmq/spark/pipelines/", "tools/"),
    "click": ("tfmq/cli/", "tfmq/server/main.py", "tfmq/spark/pipelines/", "tools/"),
    "pyspark": ("tfmq/spark/", "pyspark_tfmq/", "tools/"),
    "pyarrow": ("tfmq/arrow/", "tfmq/spark/", "tools/"),
    "numpy": ("tfmq/arrow/", "tfmq/spark/", "tools/"),
    "matplotlib": ("tfmq/spark/pipelines/", "tools/"),
    "pickle": (),
    "marshal": (),
}


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
