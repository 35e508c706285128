"""`tfmq user`: the file of users of a server. Passwords are asked for, and never arguments."""

import getpass
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from tfmq.access.quotas import QUOTA_MAX, Quotas
from tfmq.access.rights import ACTIONS, RIGHTS_MAX, Right, Rights, parse_right
from tfmq.access.scram import Keys, make_keys
from tfmq.access.users import USERS_MAX, User, changing_users, check_user_name, load_users, with_rights
from tfmq.cli.output import Function, Output, did_you_mean, offline_options
from tfmq.errors import BadRequest

COLUMNS = ("name", "rights", *Quotas._fields)
DEFAULT_FILE = "tfmq-users.json"
PASSWORD_BYTES_MAX = 1024
"""Longer input is no password, but a mistake, such as another file."""
RELOAD = "a running server reads the file on SIGHUP"

ADD_EXAMPLES = """\b
Examples:
  tfmq user add billing --right "read:orders-*" --right group:billing
  tfmq user add shop --right write:orders --bytes-per-second 1000000 --password-stdin < password
  tfmq user add operator --right admin

\b
Rights:
""" + "".join(
    f"  {name + ':' + action.of.upper() if action.of else name:<19}{action.text}\n" for name, action in ACTIONS.items()
)


@click.group(epilog="\b\nExample:\n  tfmq user add billing --right read:orders --right group:billing")
def user() -> None:
    """Users: add, list, remove, password, grant, revoke, quota."""


file_option = click.option(
    "--file",
    metavar="FILE",
    envvar="TFMQ_SERVER_USERS",
    default=DEFAULT_FILE,
    help=f"The server's file of users [$TFMQ_SERVER_USERS, else {DEFAULT_FILE}].",
)
password_option = click.option(
    "--password-stdin", is_flag=True, help="Read the password from standard input, one line, instead of asking for it."
)


def quota_options(command: Function) -> Function:
    for name, what in (
        ("--connections", "Connections at the same time"),
        ("--messages-per-second", "Messages sent a second"),
        ("--bytes-per-second", "Bytes sent and read a second"),
    ):
        command = click.option(name, type=click.IntRange(min=0), metavar="N", help=f"{what}; 0: no limit.")(command)
    return command


@user.command(epilog=ADD_EXAMPLES)
@click.argument("name")
@click.option("--right", "rights", metavar="RIGHT", multiple=True, help="ACTION:PATTERN or ACTION; may be repeated.")
@quota_options
@password_option
@file_option
@offline_options
def add(
    name: str, rights: tuple[str, ...], password_stdin: bool, file: str, output: Output, **quotas: int | None
) -> None:
    """Add the user NAME, and ask for the password."""
    check_user_name(name)
    granted = _parse_rights(rights)
    if name in _load_or_empty(file):
        raise _exists(name, file)
    keys = _read_keys(password_stdin)
    with changing_users(file, create=True) as users:
        if name in users:
            raise _exists(name, file)
        if len(users) >= USERS_MAX:
            raise click.ClickException(f"{file} has {USERS_MAX} users, which is the limit: remove some.")
        users[name] = User(name, keys, Rights(granted), _changed(Quotas(), quotas))
    none = "" if granted else f" It has no rights yet: tfmq user grant {name} RIGHT."
    _report(output, users[name], f"{name} is added to {file}; {RELOAD}.{none}")


@user.command("list", epilog="\b\nExample:\n  tfmq user list --file /etc/tfmq/users.json")
@file_option
@offline_options
def list_command(file: str, output: Output) -> None:
    """List the users, with their rights and quotas."""
    found = [_json_row(each) for _, each in sorted(load_users(file).items())]
    if not output.json:
        found = [
            {"name": row["name"], "rights": ", ".join(row["rights"]) or None}
            | {key: value or None for key, value in row["quotas"].items()}
            for row in found
        ]
    output.print_rows(found, COLUMNS, f"no users in {file} yet: tfmq user add makes one")


@user.command(epilog="\b\nExample:\n  tfmq user remove billing")
@click.argument("name")
@file_option
@offline_options
def remove(name: str, file: str, output: Output) -> None:
    """Remove the user NAME."""
    with _changing(name, file) as users:
        removed = users.pop(name)
    _report(output, removed, f"{name} is removed from {file}; {RELOAD}, and ends the user's connections.")


@user.command(epilog="\b\nExample:\n  tfmq user password billing --password-stdin < password")
@click.argument("name")
@password_option
@file_option
@offline_options
def password(name: str, password_stdin: bool, file: str, output: Output) -> None:
    """Set another password for the user NAME."""
    _check_known(name, load_users(file), file)
    keys = _read_keys(password_stdin)
    with _changing(name, file) as users:
        users[name] = users[name]._replace(keys=keys)
    _report(output, users[name], f"{name} has another password in {file}; {RELOAD}, and ends the user's connections.")


@user.command(epilog='\b\nExample:\n  tfmq user grant billing "write:invoices-*" transactions')
@click.argument("name")
@click.argument("rights", metavar="RIGHT...", nargs=-1, required=True)
@file_option
@offline_options
def grant(name: str, rights: tuple[str, ...], file: str, output: Output) -> None:
    """Give the user NAME more rights: ACTION:PATTERN or ACTION."""
    granted = _parse_rights(rights)
    with _changing(name, file) as users:
        users[name] = with_rights(users[name], granted, {})
        if len(users[name].rights.all) > RIGHTS_MAX:
            raise click.ClickException(f"{name} would have more than {RIGHTS_MAX} rights: use patterns, read:orders-*.")
    _report(output, users[name], _rights_sentence(users[name]))


@user.command(epilog='\b\nExample:\n  tfmq user revoke billing "write:invoices-*"')
@click.argument("name")
@click.argument("rights", metavar="RIGHT...", nargs=-1, required=True)
@file_option
@offline_options
def revoke(name: str, rights: tuple[str, ...], file: str, output: Output) -> None:
    """Take rights from the user NAME, each as it was given."""
    revoked = _parse_rights(rights)
    with _changing(name, file) as users:
        held = users[name].rights.all
        for right in revoked:
            if right not in held:
                hint = did_you_mean(str(right), map(str, held))
                raise click.ClickException(f"{name} has no right {right}: {_rights_text(users[name])}.{hint}")
        users[name] = with_rights(users[name], {}, revoked)
    _report(output, users[name], _rights_sentence(users[name]))


@user.command(epilog="\b\nExample:\n  tfmq user quota billing --connections 20 --messages-per-second 0")
@click.argument("name")
@quota_options
@file_option
@offline_options
def quota(name: str, file: str, output: Output, **quotas: int | None) -> None:
    """Change the quotas of the user NAME; those that are not given stay."""
    if all(value is None for value in quotas.values()):
        raise click.UsageError(f"name a quota: --{', --'.join(Quotas._fields)}.".replace("_", "-"))
    with _changing(name, file) as users:
        users[name] = users[name]._replace(quotas=_changed(users[name].quotas, quotas))
    limits = ", ".join(_limit_text(key, value) for key, value in users[name].quotas._asdict().items())
    _report(output, users[name], f"{name} may have {limits}; {RELOAD}.")


def _limit_text(key: str, value: int) -> str:
    noun, *more = key.split("_")
    return " ".join((str(value or "any number of"), noun.removesuffix("s") if value == 1 else noun, *more))


# The file


@contextmanager
def _changing(name: str, file: str) -> Iterator[dict[str, User]]:
    load_users(file)  # for its sentence about a file that is missing, also with its folder
    with changing_users(file) as users:
        _check_known(name, users, file)
        yield users


def _load_or_empty(file: str) -> Mapping[str, User]:
    if os.path.exists(file):
        return load_users(file)
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise BadRequest(f"{file} cannot be made, because there is no folder {folder}: create that first.")
    return {}


def _check_known(name: str, users: Mapping[str, User], file: str) -> None:
    if name not in users:
        raise click.ClickException(f"there is no user {name!r} in {file}.{did_you_mean(name, users)}")


def _exists(name: str, file: str) -> click.ClickException:
    return click.ClickException(
        f"there is a user {name} in {file} already: tfmq user password, grant, revoke and quota change it."
    )


def _parse_rights(texts: tuple[str, ...]) -> dict[Right, None]:
    if len(texts) > RIGHTS_MAX:
        raise click.UsageError(f"a user has at most {RIGHTS_MAX} rights: use patterns, read:orders-*.")
    return dict.fromkeys(map(parse_right, texts))


def _changed(quotas: Quotas, given: Mapping[str, int | None]) -> Quotas:
    return quotas._replace(**{key: min(value, QUOTA_MAX) for key, value in given.items() if value is not None})


# Passwords


def _read_keys(from_stdin: bool) -> Keys:
    """Return the keys of a password that is asked for twice, without echo, or read from standard input."""
    text = _read_line() if from_stdin else _ask()
    if not text:
        raise click.UsageError("the password is empty.")
    return make_keys(text, secrets.token_bytes)


def _read_line() -> str:
    data = sys.stdin.buffer.read(PASSWORD_BYTES_MAX + 1)
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if len(data) > PASSWORD_BYTES_MAX or b"\n" in line:
        raise click.UsageError(f"standard input must be one line, at most {PASSWORD_BYTES_MAX} bytes: the password.")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise click.UsageError("the password on standard input is not UTF-8.") from None


def _ask() -> str:
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask for the password: add --password-stdin.")
    try:
        # Not click.prompt, which shows its text before the echo is off.
        text, again = getpass.getpass("Password: "), getpass.getpass("The same password again: ")
    except EOFError:
        raise click.Abort from None
    if text != again:
        raise click.ClickException("the two passwords differ; nothing was changed.")
    return text


# Output


def _json_row(user: User) -> dict[str, Any]:
    return {"name": user.name, "rights": list(map(str, user.rights.all)), "quotas": user.quotas._asdict()}


def _report(output: Output, user: User, sentence: str) -> None:
    output.report(_json_row(user), sentence)


def _rights_text(user: User) -> str:
    return "it has " + (", ".join(map(str, user.rights.all)) or "none")


def _rights_sentence(user: User) -> str:
    return f"{user.name}: {_rights_text(user)}; {RELOAD}."
