"""A letter of a topic read again from its events."""

from __future__ import annotations

from tests.dead_letters.helpers import Process
from tests.dead_letters.test_shelf import keeping
from tfmq.client.send.idempotent_send import ProducerPartition
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD
from tfmq.dead_letters.topic_store import TopicLetterStore, load_full_letter
from tfmq.testing.broker import SimulatedBroker


def test_it_is_what_its_events_add_up_to_and_other_records_are_none_of_them() -> None:
    with SimulatedBroker() as broker:
        process = Process(broker, "dead")
        first, second = keeping(1), keeping(2)
        for step in (
            first,
            second,
            (first[0], model.RetryEvent(20, 3)),
            (first[0], model.TakeEvent(20, "me", 30)),
        ):
            process.run(process.shelf.apply([step]))
        assert isinstance(process.shelf, TopicLetterStore)
        stream = ProducerPartition("dead", broker.admin().topic("dead").incarnation, 0, 0)
        places = [each.offset for each in broker.sent("dead")]

        def read(places: list[int]) -> object:
            return process.run(
                load_full_letter(process.link, stream, first[0], places, process.link.now() + 5)
            )

        letter = read(places)
        assert letter is not None and letter == process.run(process.shelf.get(first[0]))
        assert getattr(letter, "token", "") == "me"
        assert getattr(read(places[:1]), "state", "") == DEAD
        assert read(places[1:2]) is None
        assert read([10**9]) is None
