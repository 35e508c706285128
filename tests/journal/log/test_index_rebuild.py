"""An index that must be made anew takes as long as its segment is large: the owner of the log does not wait for it."""

import threading

from tests.journal.logs import FOLDER, Bench


def test_the_log_goes_on_while_an_index_is_made_anew() -> None:
    bench = Bench(segment_bytes=4000)
    log = bench.open()
    for _ in range(40):
        bench.send(5)
    log.close()
    for name in bench.names(".index"):
        bench.disk.unlink(f"{FOLDER}/{name}")
    log = bench.open()
    extent = log._segment_set
    free: list[bool] = []

    def owner() -> None:
        taken = extent.lock.acquire(timeout=5)
        free.append(taken)
        if taken:
            extent.lock.release()

    def before(kind: str, path: str) -> None:
        if kind == "read" and path.endswith(".zxQueue") and len(free) < 3:
            thread = threading.Thread(target=owner)
            thread.start()
            thread.join()

    bench.disk.faults.before = before
    assert log.offset_of_ordinal(20)[1] == 20
    log.before_append(100)()  # type: ignore[misc]
    assert free == [True] * 3
