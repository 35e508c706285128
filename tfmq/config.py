"""The configuration: `load` merges command line options, the environment, the file and the defaults.

Precedence: options and `--set` > `TFMQ_SECTION_KEY` > file > default. The origin of each value is kept. Any invalid
value raises `ConfigError` with one sentence that names the origin and, for a misspelt key, the likely key. The keys and
their defaults are in `tfmq.settings_table`.
"""

import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tfmq.databases import url_without_passwords
from tfmq.errors import BadRequest, ConfigError
from tfmq.limits import BLOCK_BYTES, HEADER_BYTES, effective_limits, is_valid_name
from tfmq.settings_table import (
    RELOADED,
    SECTIONS,
    SETTINGS,
    TOPIC_KEYS,
    Delay,
    Flush,
    Http,
    Log,
    Replicate,
    Retention,
    Server,
    Topics,
    Transaction,
    Verification,
)

DEFAULT = "default"

PREFIX: Final = "TFMQ_"
VARIABLES: Final = {f"{PREFIX}{key.replace('.', '_').upper()}": key for key in SETTINGS}

OTHER_VARIABLES: Final = ("TFMQ_SERVERS", "TFMQ_PASSWORD", "TFMQ_CLIENT_ID")
OTHER_PREFIXES: Final = ("TFMQ_TEST_", "TFMQ_BENCH_", "TFMQ_MUTANTS_")
"""Names, and beginnings of names, of variables that clients, tests and tools read. Any other TFMQ_ variable that is no
setting is reported as misspelt."""

_SERVICE: Final = re.compile(
    r"TFMQ_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Names of variables that Kubernetes sets in every pod if there is a service called tfmq or tfmq-NAME."""


class SettingValue(NamedTuple):
    """The value of one key in one source: the file, the environment, an option or `--set`.

    `origin` names the source for users. `topic`: the topic in whose section the key is; "" for the server's own keys.
    `typed`: the source has types (TOML), so that a string is rejected where a number is needed.
    """

    key: str
    value: Any
    origin: str
    topic: str = ""
    typed: bool = False


@dataclass(frozen=True)
class Config:
    """The complete configuration. `Config()` has the default of each setting.

    `limits`: limit's name -> value. `topic`: topic -> the values of its section `[topic."NAME"]`, by key. `origins`:
    key -> where its value comes from, for each key that a source sets.
    """

    server: Server = field(default_factory=Server)
    flush: Flush = field(default_factory=Flush)
    log: Log = field(default_factory=Log)
    retention: Retention = field(default_factory=Retention)
    verification: Verification = field(default_factory=Verification)
    replicate: Replicate = field(default_factory=Replicate)
    topics: Topics = field(default_factory=Topics)
    transaction: Transaction = field(default_factory=Transaction)
    delay: Delay = field(default_factory=Delay)
    http: Http = field(default_factory=Http)
    limits: Mapping[str, int] = field(default_factory=lambda: effective_limits({}))
    topic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        section, name = key.split(".")
        return self.limits[name] if section == "limits" else getattr(getattr(self, section), name)

    @property
    def values(self) -> dict[str, Any]:
        return {key: self.value(key) for key in SETTINGS}


def load(
    file: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Iterable[str] = (),
    again: bool = False,
) -> Config:
    """Load the configuration. Raises `ConfigError` for an invalid value, and for a `file` that cannot be read.

    `flags`: key -> value of command line options such as `--data`; `sets`: the texts "KEY=VALUE" of `--set`. `again`:
    whether a running server reads the configuration again; `file` must then be a regular file.
    """
    if file and again and Path(file).exists() and not Path(file).is_file():
        # A pipe cannot be read twice: the server would block, or take the empty rest for the configuration.
        raise ConfigError(f"{file} is no regular file, and only such a one can be read again.")
    given = [
        *(_from_file(file) if file else ()),
        *_from_environment(environment or {}),
        *(
            SettingValue(key, value, "--" + key.rpartition(".")[2].replace("_", "-"))
            for key, value in (flags or {}).items()
            if value is not None
        ),
        *(_from_set(text) for text in sets),
    ]
    values: dict[str, Any] = {}
    topics: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for key, value, origin, topic, typed in given:
        read = parse_value(key, value, origin, topic, typed)
        (topics.setdefault(topic, {}) if topic else values)[key] = read
        origins[f'topic."{topic}".{key}' if topic else key] = origin
    return _build_config(values, topics, origins)


def _build_config(
    values: Mapping[str, Any], topics: Mapping[str, Mapping[str, Any]], origins: Mapping[str, str]
) -> Config:
    """Return a configuration: `values`, else defaults. Raises `ConfigError` if the values contradict each other."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in (*SECTIONS, "limits")}
    for key, value in values.items():
        section, name = key.split(".")
        parts[section][name] = value
    config = Config(
        **{section: shape(**parts[section]) for section, shape in SECTIONS.items()},
        limits=effective_limits(parts["limits"]),
        topic=topics,
        origins=origins,
    )
    _check_combinations(config)
    return config


def parse_value(key: str, value: Any, origin: str, topic: str = "", typed: bool = False) -> Any:
    """Check the value of a key and convert it to the type that the code uses.

    `origin`: the source, named in errors. `topic`: the topic in whose section the key is, or "". `typed`: whether the
    source has types, as TOML has. Raises `ConfigError` for an unknown key or an invalid value.
    """
    known = TOPIC_KEYS if topic else SETTINGS
    shown = f'topic."{topic}".{key}' if topic else key
    if key not in known:
        raise ConfigError(f"There is no key {shown} ({origin}){_suggestion(key, known)}", key=shown)
    setting, _ = SETTINGS[key]
    if typed and isinstance(value, str) and not setting.kind.is_text:
        raise ConfigError(
            f"{shown} must be {setting.kind.text}, written without quotes, not {_shorten(value)} ({origin}).", key=shown
        )
    try:
        read = setting.kind.read(value)
    except ValueError as error:
        raise ConfigError(f"{shown} must be {error}, not {_shorten(value)} ({origin}).", key=shown) from None
    return read


def _shorten(value: Any) -> str:
    return repr(value)[:80]


def _suggestion(key: str, known: Iterable[str]) -> str:
    """Return the end of an error text: "; did you mean ...?", or "." if there is no similar key.
    If no key is similar as a whole, a key with the same last word counts as similar."""
    known = list(known)
    # For the name of a section, suggest its time or size: for `retention`, retention.seconds, not the most similar key.
    near = [f"{key}.{last}" for last in ("seconds", "bytes") if f"{key}.{last}" in known][:1]
    # A key that was not written to its end, such as server.tls_cert, before one that has only as many letters.
    near = near or [each for each in known if "." in key and each.startswith(key)][:1]
    near = near or difflib.get_close_matches(key, known, 1, 0.6)
    if not near:
        last = key.rsplit(".", 1)[-1]
        near = [each for each in known if each.rsplit(".", 1)[-1] == last][:1]
    return f'; did you mean "{near[0]}"?' if near else "."


def check_topic_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for a new topic (keys: `TOPIC_KEYS`), checked and converted. Raises `BadRequest`."""
    try:
        return {key: parse_value(key, value, "the topic's settings", "NEW") for key, value in settings.items()}
    except ConfigError as error:
        raise BadRequest(error.sentence.replace('topic."NEW".', "")) from None


def check_topic_keys(keys: Iterable[str]) -> None:
    for key in keys:
        if key not in TOPIC_KEYS:
            raise BadRequest(f"There is no key {_shorten(key)[1:-1]} of a topic{_suggestion(key, TOPIC_KEYS)}")


def _check_combinations(config: Config) -> None:
    for name in ("tls_key", "tls_client_ca"):
        if getattr(config.server, name) and not config.server.tls_certificate:
            raise ConfigError(f"server.{name} needs server.tls_certificate, the server's own.", key=f"server.{name}")
    server = config.server
    is_closed = server.tls_certificate and (server.users or server.tls_client_ca)
    for key in ("server.listen", "http.listen"):
        listen = config.value(key)
        if listen and not is_loopback(split_address(listen)[0]) and not server.insecure and not is_closed:
            raise ConfigError(
                f"{key} is {listen}, outside of this machine, where anyone could read and write."
                " Use TLS (server.tls_certificate, server.tls_key) and users (server.users) or certificates of clients"
                " (server.tls_client_ca), or set server.insecure = true if the network is trusted.",
                key=key,
                listen=listen,
            )
    largest, frame = config.limits["message_bytes"], config.limits["frame_bytes"]
    if frame < largest + BLOCK_BYTES + HEADER_BYTES:
        raise ConfigError(
            f"limits.frame_bytes is {frame}, which cannot carry a message of limits.message_bytes = {largest}:"
            f" it must be at least {largest + BLOCK_BYTES + HEADER_BYTES}.",
            key="limits.frame_bytes",
        )
    if config.limits["fetch_bytes"] + HEADER_BYTES > frame:
        raise ConfigError("limits.fetch_bytes must be 4 MiB less than limits.frame_bytes.", key="limits.fetch_bytes")
    replicate = config.replicate
    if replicate.lease_seconds < LEASE_HEARTBEATS_MIN * replicate.heartbeat_seconds:
        raise ConfigError(
            f"replicate.lease_seconds is {replicate.lease_seconds:.15g}, less than {LEASE_HEARTBEATS_MIN} times"
            f" replicate.heartbeat_seconds = {replicate.heartbeat_seconds:.15g}: a late heartbeat would end a term.",
            key="replicate.lease_seconds",
        )
    for key, bound in _DEFAULT_BOUNDS.items():
        most = config.value(bound)
        if config.value(key) > most:
            origin = config.origins.get(key, DEFAULT)
            raise ConfigError(f"{key} is {config.value(key):.15g} s ({origin}), more than {bound} = {most}.", key=key)


LEASE_HEARTBEATS_MIN: Final = 3

_DEFAULT_BOUNDS = {
    "transaction.timeout_seconds": "limits.transaction_seconds",
    "transaction.group_ttl_seconds": "limits.transaction_ttl_seconds",
}
"""Key of a default time -> key of the limit on the time that a client may request; the default must not exceed it."""


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT into (host, port), the host without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. An empty host means all addresses, so it returns False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The sources of settings: each function yields a SettingValue for every key that is set in its source.


def _from_file(path: str) -> list[SettingValue]:
    try:
        return list(_file_values(path, tomllib.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        # tomllib raises a plain ValueError for a number that is too long, and RecursionError for lists nested too deep.
        raise ConfigError(f"The configuration {path} is not TOML: {error}.") from None


def _file_values(path: str, tree: dict[str, Any]) -> Iterator[SettingValue]:
    topics = tree.pop("topic", {})
    if not isinstance(topics, dict):
        raise ConfigError(f'In {path}, topic must be written as [topic."NAME"].')
    yield from _flatten(tree, path)
    for name, part in topics.items():
        if not is_valid_name(name):
            raise ConfigError(f"In {path}, {name!r} cannot name a topic.")
        if not isinstance(part, dict):
            raise ConfigError(f'In {path}, topic must be written as [topic."NAME"].')
        yield from _flatten(part, path, name)


def _flatten(tree: Mapping[str, Any], origin: str, topic: str = "", before: str = "") -> Iterator[SettingValue]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, origin, topic, f"{before}{name}.")
        else:
            yield SettingValue(before + name, value, origin, topic, typed=True)


def _from_environment(environment: Mapping[str, str]) -> Iterator[SettingValue]:
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX):
            continue
        key = VARIABLES.get(name.upper())
        if key is not None:
            yield SettingValue(key, value, name)
        elif not _is_of_others(name, value):
            # The value is not shown: it may be a secret of a program that has nothing to do with this one.
            raise ConfigError(f"There is no setting for the environment variable {name}{_near_variable(name)}")


def _is_of_others(name: str, value: str) -> bool:
    if name in OTHER_VARIABLES or name.startswith(OTHER_PREFIXES) or _SERVICE.fullmatch(name):
        return True
    # TFMQ_PORT=8367 was set by the user. TFMQ_PORT=tcp://10.0.0.1:8367 was set by Kubernetes for a service.
    return name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value) is not None


def _near_variable(name: str) -> str:
    """Return the end of the error text for an unknown environment variable; it names a similar variable, if any."""
    word = name.upper().removeprefix(PREFIX)
    near = [each for each, key in VARIABLES.items() if key.split(".")[1] == word.lower()]
    near = near or [each for last in ("SECONDS", "BYTES") if (each := f"{PREFIX}{word}_{last}") in VARIABLES]
    if not near:
        known = {each.removeprefix(PREFIX): each for each in (*VARIABLES, *OTHER_VARIABLES)}
        near = [known[each] for each in difflib.get_close_matches(word, known, 1, 0.6)]
    if not near:
        return "; tfmq-server --check-config lists the settings."
    key = VARIABLES.get(near[0])
    return f'; did you mean "{key}", {near[0]}?' if key else f"; did you mean {near[0]}?"


def _from_set(text: str) -> SettingValue:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes SECTION.KEY=VALUE, not {text!r}.")
    path, origin = _split_key(key.strip()), f"--set {key.strip()}"
    if path[0] != "topic":
        return SettingValue(".".join(path), value.strip(), origin)
    if len(path) < 3 or not is_valid_name(path[1]):
        raise ConfigError(f'A topic has its keys as topic."NAME".SECTION.KEY, not {key.strip()} ({origin}).')
    return SettingValue(".".join(path[2:]), value.strip(), origin, path[1])


def _split_key(key: str) -> list[str]:
    """Return the parts of a key as TOML splits it: topic."a.b".flush.messages has four."""
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"--set takes SECTION.KEY=VALUE, and {key!r} is no key.") from None
    path = []
    while isinstance(node, dict):
        name, node = next(iter(node.items()))
        path.append(name)
    return path


# A new configuration for a running server.


class ReloadResult(NamedTuple):
    """Result of a reload: the new configuration, the applied changes as texts "KEY = VALUE (was VALUE)", and the keys
    whose change was not applied.
    """

    config: Config
    changed: list[str]
    needs_restart: list[str]


def merge_reload(old: Config, new: Config) -> ReloadResult:
    """Return `old` with the values of `new` that can change without a restart.
    Raises `ConfigError` if the resulting values contradict each other."""
    values: dict[str, Any] = {}
    changed, later = [], []
    origins = {key: origin for key, origin in new.origins.items() if key in RELOADED or key not in SETTINGS}
    for key in SETTINGS:
        value, before = new.value(key), old.value(key)
        if key in RELOADED:
            values[key] = value
            if value != before:
                changed.append(f"{key} = {json.dumps(value)} (was {json.dumps(before)})")
        else:
            values[key] = before
            if key in old.origins:
                origins[key] = old.origins[key]
            if value != before:
                later.append(key)
    changed += _changed_topics(old, new)
    return ReloadResult(_build_config(values, new.topic, origins), changed, later)


def _changed_topics(old: Config, new: Config) -> list[str]:
    changed = []
    for topic in sorted({*old.topic, *new.topic}):
        before, after = old.topic.get(topic, {}), new.topic.get(topic, {})
        for key in TOPIC_KEYS:
            if before.get(key) != after.get(key):
                shown = [json.dumps(each[key]) if key in each else "not set" for each in (after, before)]
                changed.append(f'topic."{topic}".{key} = {shown[0]} (was {shown[1]})')
    return changed


# Output of --check-config


def config_rows(config: Config) -> list[tuple[str, Any, str]]:
    found = [(key, config.value(key), config.origins.get(key, DEFAULT)) for key in SETTINGS]
    for topic, values in config.topic.items():
        for key, value in values.items():
            name = f'topic."{topic}".{key}'
            found.append((name, value, config.origins.get(name, DEFAULT)))
    return found


def _shown(value: Any) -> Any:
    return url_without_passwords(value) if isinstance(value, str) and "://" in value else value


def describe(config: Config) -> str:
    """Return the configuration as a text table: key, value and origin in each line. Passwords in URLs are masked."""
    table = [(key, json.dumps(_shown(value)), origin) for key, value, origin in config_rows(config)]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}" for key, value, origin in table)
