"""Who gets which partitions: the ranges of MetaMorphosis, as a pure function that every member works out alike."""

from collections.abc import Iterable, Mapping, Sequence

from tfmq.offsets.storage import PartitionName


def range_of(
    member: str, members: Mapping[str, Iterable[str]], partitions: Mapping[str, Sequence[int]]
) -> frozenset[PartitionName]:
    """The partitions of `member`, where `members` names the topics of each, itself included.

    For each topic the partitions in order are cut into as many pieces as it has members, the first ones longer by one
    where that does not come out even; the members in order take one each.
    """
    found: set[PartitionName] = set()
    for topic, numbers in partitions.items():
        sharing = sorted(each for each, topics in members.items() if topic in topics)
        if member in sharing:
            place, ordered = sharing.index(member), sorted(numbers)
            length, longer = divmod(len(ordered), len(sharing))
            start = place * length + min(place, longer)
            end = start + length + (place < longer)
            found.update(PartitionName(topic, number) for number in ordered[start:end])
    return frozenset(found)
