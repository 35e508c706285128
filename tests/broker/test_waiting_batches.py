"""A batch that waits for file work gives back the memory it came in, which a whole turn shares."""

from tests.broker.helpers import Broker, batch
from tfmq.protocol.commands import ACKS_SYNCED, Produce


def test_what_waits_for_a_roll_holds_only_its_own_bytes() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    answers, memory = [], []
    for sequence in range(2, 5):
        body = bytearray(batch(producer, sequence, [b"%d" % sequence * 20_000]))
        request = Produce("orders", broker.incarnation(), 0, producer, sequence, 1, ACKS_SYNCED, [])
        answers.append(broker.ask(request, body, turn=sequence != 2))  # type: ignore[arg-type]
        memory.append(body)
    assert [answer.code for answer in answers] == ["waiting"] * 3
    assert all(answer.released for answer in answers)
    for body in memory:
        body[:] = bytes(len(body))
    broker.work()
    assert [answer.code for answer in answers] == ["ok"] * 3
    assert broker.payloads()[2:] == [b"%d" % sequence * 20_000 for sequence in range(2, 5)]
