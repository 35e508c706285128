"""How far a consumer is behind: in messages, by partition and in all."""

from tfmq.client.call import Call
from tfmq.client.fetcher import Feed, Fetcher
from tfmq.client.link import Link
from tfmq.client.positions import UNKNOWN, PartitionName, Positions
from tfmq.client.waiting import Operation, Wait
from tfmq.errors import StorageStopped, UnknownTopic
from tfmq.protocol.commands import BY_LATEST, BY_OFFSET, Locate


class Lag(int):
    """Messages that are there and were not handed out: the number is the total, `partitions` has each; -1: cannot be
    told, because its place is in a damaged range, or its log is not open."""

    partitions: dict[PartitionName, int]

    def __new__(cls, partitions: dict[PartitionName, int]) -> "Lag":
        lag = super().__new__(cls, sum(max(0, each) for each in partitions.values()))
        lag.partitions = partitions
        return lag


def measure(link: Link, fetcher: Fetcher, positions: Positions, seconds: float) -> Operation[Lag]:
    """Asks the broker where the logs end, all at once, and where the reader stands where it does not know that.

    Partitions of topics that are gone are left out.
    """
    places = {name: positions.handed_out(name) for name in fetcher.feeds}
    ends = {name: _locate(link, fetcher.feeds[name], BY_LATEST, 0, seconds) for name in places}
    here = {
        name: _locate(link, fetcher.feeds[name], BY_OFFSET, place.offset, seconds)
        for name, place in places.items()
        if place.ordinal == UNKNOWN
    }
    calls = [*ends.values(), *here.values()]
    try:
        for call in calls:
            while not call.done:
                yield Wait((call,))
    finally:
        for call in calls:
            link.abandon(call)
    lags = {}
    for name, place in places.items():
        try:
            ordinal = here[name].result().ordinal if name in here else place.ordinal
            end = ends[name].result().end_ordinal
        except UnknownTopic:
            continue
        except StorageStopped:
            ordinal = end = UNKNOWN
        lags[name] = UNKNOWN if ordinal == UNKNOWN else max(0, end - ordinal)
    return Lag(lags)


def _locate(link: Link, feed: Feed, by: int, value: int, seconds: float) -> Call:
    return link.call(
        Locate(feed.name.topic, feed.incarnation, feed.name.partition, by, value), seconds=seconds
    )
