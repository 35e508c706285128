"""Chunks move between the lists of their usage, and the empty ones go."""

from journal.buffers.arena import RANGES_PERCENT, TREE_DEPTH, ChunkLists
from tests.scale import scaled, seeded


def test_a_chunk_moves_up_as_it_fills_and_goes_when_it_empties() -> None:
    lists = ChunkLists()
    taken = [lists.allocate(2) for _ in range(3)]
    assert lists.counts() == (0, 0, 0, 1, 0, 0), "three quarters"
    taken.append(lists.allocate(2))
    assert lists.counts() == (0, 0, 0, 0, 0, 1), "full"
    for chunk, node in taken:
        lists.free(chunk, node)
    assert len(lists) == 0


def test_a_chunk_that_never_left_the_first_list_stays() -> None:
    lists = ChunkLists()
    lists.free(*lists.allocate(TREE_DEPTH))
    assert lists.counts() == (1, 0, 0, 0, 0, 0)
    assert lists.drop_empty() == 1
    assert len(lists) == 0


def test_every_chunk_is_always_in_a_list_whose_range_holds_its_usage() -> None:
    random = seeded("usage")
    lists = ChunkLists()
    out = []
    for _ in range(scaled(60_000)):
        if random.random() < (0.6 if len(out) < 60 else 0.4) or not out:
            out.append(lists.allocate(random.randint(1, TREE_DEPTH)))
        else:
            lists.free(*out.pop(random.randrange(len(out))))
        for chunk, index in lists._list_index.items():
            least, limit = RANGES_PERCENT[index]
            assert least <= chunk.usage_percent < limit
    for place in out:
        lists.free(*place)
    assert sum(lists.counts()) == lists.counts()[0]
