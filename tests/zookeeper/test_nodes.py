"""The requests of a coordinator."""

from tfmq.zookeeper.session import CHANGES, Children, Create, Delete, Read, ReadAll, Write


def test_only_changes_prove_that_a_session_lives() -> None:
    changes = [Create("/a", b""), Write("/a", b""), Delete("/a", 0, "/b")]
    reads = [Children("/a"), Read("/a"), ReadAll(["/a"])]
    assert all(isinstance(each, CHANGES) for each in changes)
    assert not any(isinstance(each, CHANGES) for each in reads)
