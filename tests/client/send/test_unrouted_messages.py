"""Messages with keys that were sent before the topic was known were each compared with all of those before: 8,000 held
up the event loop for more than a second, 40,000 for half a minute.
"""

import time

from tests.client.rig import SenderRig


def test_what_waits_for_the_topic_waits_once_and_is_not_searched() -> None:
    rig = SenderRig(buffer_bytes=1 << 30)
    started = time.process_time()
    for number in range(30_000):
        rig.send(b"x", key=str(number))
    assert time.process_time() - started < 5
    assert len(rig.sender.topic_entry("orders").waiting_batches) == 30_000
