"""A topic by the name that a person typed, with a hint when there is none of that name."""

from typing import TYPE_CHECKING, Any

import click

from tfmq.cli.output import did_you_mean
from tfmq.errors import UnknownTopic
from tfmq.limits import valid_name

if TYPE_CHECKING:
    from tfmq.admin import Admin

NONE_YET = " There are no topics yet: tfmq send TOPIC PAYLOAD makes one."


def check_name(name: str) -> None:
    """Raises UsageError for what cannot be the name of a topic, before a broker is asked."""
    if valid_name(name):
        return
    wildcards = " There are no wildcards here: give one name." if set(name) & set("*?[]") else ""
    raise click.UsageError(
        f"{name!r} cannot be a topic: a name has 1 to 249 letters, digits, '.', '_' or '-'.{wildcards}"
    )


def known_topic(admin: "Admin", name: str) -> Any:
    """The topic's description. Raises UnknownTopic with the nearest name that there is, UsageError as `check_name`."""
    check_name(name)
    try:
        return admin.topic(name)
    except UnknownTopic:
        names = [topic.name for topic in admin.topics()]
        hint = did_you_mean(name, names) or (" `tfmq topic list` has all." if names else NONE_YET)
        raise UnknownTopic(f"There is no topic {name!r}.{hint}") from None
