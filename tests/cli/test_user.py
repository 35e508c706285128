"""`tfmq user`: what is written into the file of users, what is refused, and that no password is shown."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.terminal import in_terminal
from tfmq.access.quotas import QUOTA_MAX, Quotas
from tfmq.access.scram import is_password
from tfmq.access.users import RIGHTS_MAX, User, changing_users, load_users, save_users
from tfmq.errors import ConfigError

PASSWORD = "correct horse"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "users.json"
    monkeypatch.setenv("TFMQ_SERVER_USERS", str(path))
    return path


@pytest.fixture
def users(offline: Cli, file: Path) -> Cli:
    """The command line, after `tfmq user add billing`."""
    added = offline("user", "add", "billing", "--right", "read:orders", "--password-stdin", given=PASSWORD.encode())
    assert (added.code, added.out) == (0, b"")
    assert added.err == f"billing is added to {file}; a running server reads the file on SIGHUP.\n"
    return offline


def only(file: Path) -> User:
    (user,) = load_users(str(file)).values()
    return user


def test_a_user_is_added_with_rights_and_quotas(offline: Cli, file: Path) -> None:
    options = ["--right", "read:orders-*", "--right", "admin", "--right", "admin", "--bytes-per-second", "1000"]
    options += ["--connections", str(1 << 60), "--password-stdin", "--json"]
    added = offline("user", "add", "billing", *options, given=b"pass word\r\n")
    assert added.json == {
        "name": "billing",
        "rights": ["read:orders-*", "admin"],
        "quotas": {"bytes_per_second": 1000, "messages_per_second": 0, "connections": QUOTA_MAX},
    }
    assert is_password(only(file).keys, "pass word") and only(file).quotas == Quotas(1000, 0, QUOTA_MAX)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and b"pass word" not in file.read_bytes()


def test_two_users_with_one_password_have_other_keys(users: Cli, file: Path) -> None:
    users("user", "add", "shop", "--password-stdin", given=PASSWORD.encode())
    first, second = load_users(str(file)).values()
    assert first.keys.salt != second.keys.salt and first.keys.stored_key != second.keys.stored_key


def test_the_list_shows_names_rights_and_quotas_and_no_keys(users: Cli, file: Path) -> None:
    assert users("user", "quota", "billing", "--messages-per-second", "5").code == 0
    shown = users("user", "list")
    assert {"billing", "read:orders", "5", "-"} <= set(shown.out.decode().split())
    listed = users("user", "list", "--json", "--file", str(file))
    quotas = {"bytes_per_second": 0, "messages_per_second": 5, "connections": 0}
    assert listed.json == [{"name": "billing", "rights": ["read:orders"], "quotas": quotas}]
    assert b"key" not in shown.out + listed.out


def test_rights_quotas_and_the_password_change_one_by_one(users: Cli, file: Path) -> None:
    before = only(file)
    granted = users("user", "grant", "billing", "write:a-*", "read:orders", "monitor")
    assert granted.err.startswith("billing: it has read:orders, write:a-*, monitor; ")
    assert users("user", "revoke", "billing", "monitor", "read:orders").err.startswith("billing: it has write:a-*; ")
    assert users("user", "quota", "billing", "--connections", "3", "--bytes-per-second", "7").code == 0
    assert users("user", "quota", "billing", "--connections", "0").code == 0
    user = only(file)
    assert (user.keys, list(map(str, user.rights.all)), user.quotas) == (before.keys, ["write:a-*"], Quotas(7))
    changed = users("user", "password", "billing", "--password-stdin", given=b"other")
    assert changed.code == 0 and "ends the user's connections" in changed.err
    assert is_password(only(file).keys, "other") and only(file)._replace(keys=user.keys, rights=user.rights) == user
    assert users("user", "remove", "billing").code == 0 and load_users(str(file)) == {}


@pytest.mark.parametrize(
    ("words", "given", "code", "sentence"),
    [
        ("add billing --password-stdin", b"x", 1, "there is a user billing in {file} already"),
        ("add a/b --password-stdin", b"x", 2, "'a/b' cannot name a user: a name has 1 to 249"),
        ("add shop --right wirte:x --password-stdin", b"x", 2, "begins with one of read, write, manage,"),
        ("add shop --right read --password-stdin", b"x", 2, "after read: follows the name of a topic"),
        ("add shop --password-stdin", b"", 2, "the password is empty"),
        ("add shop --password-stdin", b"\r\n", 2, "the password is empty"),
        ("add shop --password-stdin", b"one\ntwo\n", 2, "must be one line"),
        ("add shop --password-stdin", b"x" * 2000, 2, "must be one line, at most 1024 bytes"),
        ("add shop --password-stdin", b"\xff", 2, "not UTF-8"),
        ("add shop --password-stdin", b"\0x", 2, "control characters"),
        ("add shop", b"secret", 2, "no terminal to ask for the password: add --password-stdin"),
        ("remove bilig", b"", 1, "there is no user 'bilig' in {file}. Did you mean 'billing'?"),
        ("password bilig --password-stdin", b"x", 1, "Did you mean 'billing'?"),
        ("grant bilig admin", b"", 1, "Did you mean 'billing'?"),
        ("grant billing nothing", b"", 2, "begins with one of"),
        ("revoke billing read:order", b"", 1, "it has read:orders. Did you mean 'read:orders'?"),
        ("quota billing", b"", 2, "--bytes-per-second, --messages-per-second, --connections"),
        ("quota billing --connections -1", b"", 2, "-1"),
        ("list --file nowhere.json", b"", 2, "`tfmq user add NAME --file nowhere.json` makes it"),
        ("list --file .", b"", 2, "server.users is .: the file cannot be read: Is a directory.\n"),
        ("grant billing admin --file nowhere/x.json", b"", 2, "`tfmq user add NAME --file nowhere/x.json` makes it"),
        (
            "add shop --file nowhere/x.json --password-stdin",
            b"x",
            2,
            "there is no folder {file.parent}/nowhere: create",
        ),
        ("quota billing --connections 5MB", b"", 2, "'5MB' is not a whole number."),
    ],
)
def test_what_is_refused_changes_nothing(
    users: Cli, file: Path, words: str, given: bytes, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    before = file.read_bytes()
    refused = users("user", *words.split(), given=given)
    assert (refused.code, refused.out) == (code, b"")
    assert sentence.format(file=file) in refused.err and "Traceback" not in refused.err
    assert file.read_bytes() == before and [each.name for each in file.parent.iterdir()] == [file.name]
    assert given.strip() in (b"", b"x") or given.strip() not in refused.err.encode()


def test_a_quota_of_one_is_singular(users: Cli) -> None:
    changed = users("user", "quota", "billing", "--connections", "1", "--messages-per-second", "5")
    assert "may have any number of bytes per second, 5 messages per second, 1 connection;" in changed.err


def test_a_user_has_a_limited_number_of_rights(users: Cli, file: Path) -> None:
    more = [f"read:t{number}" for number in range(RIGHTS_MAX)]
    assert users("user", "grant", "billing", *more[1:]).code == 0
    refused = users("user", "grant", "billing", more[0])
    assert refused.code == 1 and f"more than {RIGHTS_MAX} rights" in refused.err
    assert len(only(file).rights.all) == RIGHTS_MAX


def test_a_file_that_is_not_understood_is_left_as_it_is(offline: Cli, file: Path) -> None:
    file.write_text('{"version": 2, "users": {}}')
    refused = offline("user", "add", "shop", "--password-stdin", given=b"x")
    assert refused.code == 2 and "not a file of users of version 1" in refused.err
    assert file.read_text() == '{"version": 2, "users": {}}'


def test_a_link_to_the_file_stays_one(users: Cli, file: Path) -> None:
    link = file.with_name("link.json")
    link.symlink_to(file.name)
    assert users("user", "grant", "billing", "admin", "--file", str(link)).code == 0
    assert link.is_symlink() and only(file).rights.is_admin


def test_changes_at_the_same_time_are_all_made(users: Cli, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.access.users.save_users", lambda *given: time.sleep(0.02) or save_users(*given))

    def add(number: int) -> None:
        with changing_users(str(file)) as found:
            found[f"user-{number}"] = found["billing"]._replace(name=f"user-{number}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(load_users(str(file))) == 9


def test_a_failed_change_changes_nothing_and_locks_nothing(users: Cli, file: Path) -> None:
    with pytest.raises(KeyError), changing_users(str(file)) as found:
        del found["billing"]
        del found["nobody"]
    with changing_users(str(file)) as found:
        assert list(found) == ["billing"]
    with pytest.raises(ConfigError), changing_users(f"{file}.other"):
        raise AssertionError("there is no such file")


@pytest.mark.parametrize(("again", "code"), [(PASSWORD, 0), ("other", 1)])
def test_a_password_is_asked_for_twice_without_an_echo(file: Path, again: str, code: int) -> None:
    environment = {**os.environ, "TERM": "xterm", "TFMQ_SERVER_USERS": str(file)}
    typed = [("Password:", f"{PASSWORD}\n"), ("again:", f"{again}\n")]
    added = in_terminal(["user", "add", "billing"], 100, environment, typed)
    assert added.code == code and file.exists() == (code == 0)
    if code:
        assert "tfmq: the two passwords differ; nothing was changed." in added.screen
    else:
        assert is_password(only(file).keys, PASSWORD)
    assert PASSWORD.encode() not in added.sent and b"other" not in added.sent
