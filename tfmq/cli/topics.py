"""A topic by the name that a person typed, with a hint when there is none of that name."""

from typing import TYPE_CHECKING, Any

from tfmq.cli.output import did_you_mean
from tfmq.errors import UnknownTopic

if TYPE_CHECKING:
    from tfmq.admin import Admin

NONE_YET = " There are no topics yet: tfmq send TOPIC PAYLOAD makes one."


def known_topic(admin: "Admin", name: str) -> Any:
    """The topic's description. Raises UnknownTopic that names the nearest topic there is."""
    try:
        return admin.topic(name)
    except UnknownTopic:
        names = [topic.name for topic in admin.topics()]
        hint = did_you_mean(name, names) or (" `tfmq topic list` has all." if names else NONE_YET)
        raise UnknownTopic(f"There is no topic {name!r}.{hint}") from None
