"""What a consumer was told: every argument of its faces checked and put into one value."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq import limits
from tfmq.client.fetcher import FETCH_BYTES, PREFETCH_BYTES
from tfmq.client.offset_storage import OffsetStorage, open_storage
from tfmq.client.received import Codec
from tfmq.client.start import Question, Start, question
from tfmq.client.subscription import Subscription
from tfmq.errors import BadRequest, NotSupported
from tfmq.protocol.commands import READ

Topics = str | Sequence[str] | re.Pattern[str] | None
Partitions = Sequence[tuple[str, int]] | Sequence[int] | None

SESSION_SECONDS: Final = 30.0
"""How long a silent member keeps its group: longer than a pause of a busy process, shorter than a person's patience."""
SAVE_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 5.0
"""How often new partitions, and new topics of a pattern, are looked for."""
TIMEOUT_SECONDS: Final = 30.0
"""How long a commit, a seek or a close tries."""
_ON_OUT_OF_RANGE: Final = ("stop", "earliest", "latest")


class ConsumerOptions(NamedTuple):
    """A consumer's arguments, checked. Times in seconds, sizes in bytes."""

    subscription: Subscription
    group: str | None
    start: Question
    start_latest: bool
    read: int
    skip_damage: bool
    reset: str | None
    commits: str
    storage: OffsetStorage | None
    tags: frozenset[str] | None
    codec: Codec | None
    timeout: float
    session: float
    save: float
    refresh: float
    fetch_bytes: int
    prefetch_bytes: int


def consumer_options(
    *,
    topics: Topics = None,
    partitions: Partitions = None,
    group: str | None = None,
    start: Start = "earliest",
    read: str = "forced",
    on_damage: str = "stop",
    on_out_of_range: str = "stop",
    commits: str = "auto",
    offsets: "str | OffsetStorage" = "broker",
    retries: int | None = None,
    dead_letters: str | None = None,
    tags: str | Iterable[str] | None = None,
    codec: Codec | None = None,
    hooks: Sequence[Any] = (),
    timeout: float = TIMEOUT_SECONDS,
    session: float = SESSION_SECONDS,
    save_every: float = SAVE_SECONDS,
    refresh_every: float = REFRESH_SECONDS,
    fetch_bytes: int = FETCH_BYTES,
    prefetch_bytes: int = PREFETCH_BYTES,
) -> ConsumerOptions:
    """The options for the arguments of a consumer. Raises BadRequest for a wrong one, NotSupported for a later one."""
    _refuse_later({"retries": retries, "dead_letters": dead_letters, "hooks": tuple(hooks) or None})
    subscription = Subscription.of(topics, partitions)
    if group is not None and not limits.valid_name(group):
        raise BadRequest(f"{group!r} is no name of a group: letters, digits, '.', '_' and '-', at most 249.")
    _one_of("read", read, READ)
    _one_of("on_damage", on_damage, ("stop", "skip"))
    _one_of("on_out_of_range", on_out_of_range, _ON_OUT_OF_RANGE)
    _one_of("commits", commits, ("auto", "manual", "before"))
    if group is None and (commits != "auto" or offsets != "broker"):
        raise BadRequest("commits= and offsets= need a group: without one nothing is saved.")
    _check_seconds(timeout=timeout, session=session, save_every=save_every, refresh_every=refresh_every)
    _check_bytes(fetch_bytes=fetch_bytes, prefetch_bytes=prefetch_bytes)
    if codec is not None and (isinstance(codec, str) or not hasattr(codec, "decode")):
        raise BadRequest(f"A codec has encode and decode, as tfmq.codecs.json has; {codec!r} is none.")
    return ConsumerOptions(
        subscription=subscription,
        group=group,
        start=question(start),
        start_latest=start == "latest",
        read=READ[read],
        skip_damage=on_damage == "skip",
        reset=None if on_out_of_range == "stop" else on_out_of_range,
        commits=commits,
        storage=open_storage(offsets),
        tags=_tags(tags),
        codec=codec,
        timeout=timeout,
        session=session,
        save=save_every,
        refresh=refresh_every,
        fetch_bytes=fetch_bytes,
        prefetch_bytes=prefetch_bytes,
    )


def _refuse_later(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotSupported(
                f"{name}= belongs to consumer.run(), which needs a later release; leave it out."
            )


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in tuple(allowed):
        words = ", ".join(f'"{each}"' for each in allowed)
        raise BadRequest(f"{name}={value!r} is not known; it takes {words}.")


def _check_seconds(session: float, **times: float) -> None:
    for name, value in {"session": session, **times}.items():
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise BadRequest(f"{name}={value!r} is no number of seconds above 0.")
    if not limits.SESSION_MS_MIN <= session * 1000 <= limits.SESSION_MS.cap:
        raise BadRequest(f"session={session!r}: it has from 1 to {limits.SESSION_MS.cap // 1000} seconds.")


def _check_bytes(**sizes: int) -> None:
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value < 1 << 32:
            raise BadRequest(f"{name}={value!r} is no number of bytes from 1 to 4 GiB.")


def _tags(tags: str | Iterable[str] | None) -> frozenset[str] | None:
    """The tags to filter by; None: no filter. Raises BadRequest, NotSupported for expressions."""
    if tags is None:
        return None
    found = frozenset((tags,) if isinstance(tags, str) else tags)
    for tag in found:
        if not isinstance(tag, str) or not tag or len(tag.encode()) > limits.TAG_BYTES:
            raise BadRequest(
                f"{tag!r} is no tag to filter by: it takes words of up to {limits.TAG_BYTES:d} bytes."
            )
        if "||" in tag or tag == "*":
            raise NotSupported(
                f"{tag!r} is an expression over tags, which needs a later release; list the tags."
            )
    if not 0 < len(found) <= limits.FETCH_TAGS:
        raise BadRequest(f"{len(found)} tags to filter by; it takes 1 to {limits.FETCH_TAGS:d}.")
    return found
