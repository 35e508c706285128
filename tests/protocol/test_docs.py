"""docs/protocol.md, errors.md, limits.md and configuration.md name everything that the code has."""

import re

import pytest

import tfmq
from tests import paths
from tfmq import limits
from tfmq.errors import CLASSES
from tfmq.message import ATTEMPTS, BORN_AT, DELAY, KEY, PROPERTIES, REDRIVES, TAG
from tfmq.protocol.commands import COMMANDS
from tfmq.settings_table import SETTINGS

DOCS = paths.ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_page_has_every_command_with_its_fields(command) -> None:  # type: ignore[no-untyped-def]
    start = page("protocol.md").index(f"**{command.name} = {command.code}**")
    part = page("protocol.md")[start:].split("\n\n**")[0]
    for name in (*command.request.names, *command.reply.names):
        assert f"`{name}`" in part


def test_the_page_has_every_error() -> None:
    assert [each.code for each in CLASSES if f"| `{each.code}` | {each.number} |" not in page("errors.md")] == []


CLASS = re.compile(r"^class (\w+)\((\w+)[\w, ]*\):", re.MULTILINE)
INTERNAL = {"UnreadableAttribute"}
"""Never leave the package: tfmq.arrow converts them."""


def test_the_page_has_every_error_class_that_is_defined_elsewhere_or_exported() -> None:
    bases = {name: base for path in paths.ROOT.glob("tfmq/**/*.py") for name, base in CLASS.findall(path.read_text())}

    def is_error(name: str) -> bool:
        return name == "TfmqError" or (name in bases and is_error(bases[name]))

    found = {name for name in bases if is_error(name) and not name.startswith("_")} - INTERNAL
    assert {"StoreUnusable", "NotARecord"} <= found
    exported = {name for name in dir(tfmq) if is_exception(getattr(tfmq, name))}
    assert [name for name in sorted(found | exported) if f"`{name}`" not in page("errors.md")] == []


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_the_page_has_every_limit() -> None:
    assert [name for name in limits.ALL if f"| `{name}` |" not in page("limits.md")] == []


def test_the_page_has_every_key() -> None:
    """The limits stand on their own page, and nowhere twice."""
    shown = [key for key in SETTINGS if f"| `{key}` |" in page("configuration.md")]
    assert shown == [key for key in SETTINGS if not key.startswith("limits.")]


def test_the_page_has_the_keys_of_the_attribute() -> None:
    assert (BORN_AT, KEY, TAG, PROPERTIES, DELAY, ATTEMPTS, REDRIVES) == (1, 2, 3, 4, 5, 6, 7)
    assert "1 born time (ms), 2 key (text or bytes), 3 tag, 4 properties" in page("protocol.md")
    assert "6 attempts (how often its handling failed before), 7 redrives" in page("protocol.md")
