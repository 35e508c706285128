"""The requests of a coordinator."""

from tfmq.zookeeper.session import WRITES, CreateNode, DeleteNode, GetChildren, GetNode, GetNodes, SetNode


def test_only_changes_prove_that_a_session_lives() -> None:
    changes = [CreateNode("/a", b""), SetNode("/a", b""), DeleteNode("/a", 0, "/b")]
    reads = [GetChildren("/a"), GetNode("/a"), GetNodes(["/a"])]
    assert all(isinstance(each, WRITES) for each in changes)
    assert not any(isinstance(each, WRITES) for each in reads)
