"""The tap itself: it holds what the test names, and nothing else."""

import os

import tfmq
from tests.spark.wiretap import Exchange, tapped
from tools.rigs.live_server import LiveServer

SECONDS = 60.0


def test_it_sees_each_request_and_who_sent_it(spark_server: LiveServer, topic: str) -> None:
    found: list[Exchange] = []
    with tapped(spark_server.address) as tap:
        trap = tap.trap("PRODUCE", "request", found.append, nth=2)
        with tfmq.Producer(tap.address, timeout=SECONDS) as producer:
            producer.send(topic, b"1").result(SECONDS)
            assert not trap.sprung.is_set()
            producer.send(topic, b"2").result(SECONDS)
            trap.wait()
            assert found[0].process() == os.getpid()
    assert tap.seen.count("PRODUCE") == 2 and tap.seen[0] == "HELLO"
    assert found[0].request[2] == topic and found[0].reply is None


def test_a_swallowed_reply_is_of_something_that_was_done(spark_server: LiveServer, topic: str) -> None:
    with tapped(spark_server.address) as tap:
        tap.trap("PRODUCE", "reply", lambda exchange: "cut")
        with tfmq.Producer(tap.address, timeout=SECONDS) as producer:
            producer.send(topic, b"1").result(SECONDS)
    assert tap.seen.count("PRODUCE") == 2, "it was asked for again"
    with tfmq.Consumer(spark_server.address, topics=topic) as consumer:
        assert len(consumer.poll(SECONDS)) == 1


def test_a_swallowed_request_never_came(spark_server: LiveServer, topic: str) -> None:
    with tapped(spark_server.address) as tap:
        tap.trap("PRODUCE", "request", lambda exchange: "cut")
        with tfmq.Producer(tap.address, timeout=SECONDS) as producer:
            producer.send(topic, b"1").result(SECONDS)
    with tfmq.Consumer(spark_server.address, topics=topic) as consumer:
        assert len(consumer.poll(SECONDS)) == 1
