"""The Kafka side of the rows, run by the peers' own Python; prints JSON.

    kafka_client.py MODE SERVERS TOPIC COUNT [EACH]

Each client in its own best mode that we know: confluent-kafka with linger and large batches, consuming by
`consume(n)`; kafka-python with linger and large batches, consuming by `poll`.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PAYLOAD = b"x" * 100
CONFLUENT = {"linger.ms": 5, "batch.size": 1 << 20, "queue.buffering.max.messages": 2_000_000, "acks": "all"}


def confluent_produce(servers: str, topic: str, count: str) -> float:
    from confluent_kafka import Producer

    settings = {**CONFLUENT, "bootstrap.servers": servers, "queue.buffering.max.kbytes": 1 << 20}
    producer: Any = Producer(settings)
    producer.produce(topic, PAYLOAD)
    producer.flush()
    begun = time.perf_counter()
    for _ in range(int(count)):
        try:
            producer.produce(topic, PAYLOAD)
        except BufferError:
            producer.poll(0.01)
            producer.produce(topic, PAYLOAD)
    producer.flush()
    return int(count) / (time.perf_counter() - begun)


def confluent_consume(servers: str, topic: str, count: str) -> float:
    """Timed from subscribing: joining takes its share, so the first messages start the clock instead."""
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": servers, "group.id": f"g{time.time()}", "auto.offset.reset": "earliest"}
    consumer: Any = Consumer(settings)
    consumer.subscribe([topic])
    got, begun, first = 0, 0.0, 0
    while got < int(count):
        messages = consumer.consume(10_000, 1.0)
        if messages and not begun:
            begun, first = time.perf_counter(), len(messages)
        for message in messages:
            message.value()
        got += len(messages)
    seconds = time.perf_counter() - begun
    consumer.close()
    return (got - first) / seconds


def python_produce(servers: str, topic: str, count: str) -> float:
    from kafka import KafkaProducer

    producer: Any = KafkaProducer(bootstrap_servers=servers, linger_ms=5, batch_size=1 << 18, acks="all")
    producer.send(topic, PAYLOAD).get(30)
    begun = time.perf_counter()
    for _ in range(int(count)):
        producer.send(topic, PAYLOAD)
    producer.flush()
    return int(count) / (time.perf_counter() - begun)


def python_consume(servers: str, topic: str, count: str) -> float:
    from kafka import KafkaConsumer

    consumer: Any = KafkaConsumer(topic, bootstrap_servers=servers, auto_offset_reset="earliest")
    got, begun, first = 0, 0.0, 0
    while got < int(count):
        polled = [m for messages in consumer.poll(1000, max_records=10_000).values() for m in messages]
        if polled and not begun:
            begun, first = time.perf_counter(), len(polled)
        got += len([message.value for message in polled])
    return (got - first) / (time.perf_counter() - begun)


def one_at_a_time(servers: str, topic: str, count: str) -> float:
    """Median seconds of produce + flush of one message."""
    from confluent_kafka import Producer

    producer: Any = Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"})
    times = []
    for _ in range(int(count)):
        begun = time.perf_counter()
        producer.produce(topic, PAYLOAD)
        producer.flush()
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def clients(servers: str, topic: str, count: str, each: str) -> float:
    """`count` synchronous producers in threads (librdkafka works outside the interpreter's lock): messages a second."""
    from confluent_kafka import Producer

    producers: list[Any] = [
        Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"}) for _ in range(int(count))
    ]
    for producer in producers:
        producer.produce(topic, PAYLOAD)
    for producer in producers:
        producer.flush()

    def work(producer: Any) -> None:
        for _ in range(int(each)):
            producer.produce(topic, PAYLOAD)
            producer.flush()

    threads = [threading.Thread(target=work, args=(producer,)) for producer in producers]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(count) * int(each) / (time.perf_counter() - begun)


def transactions(servers: str, topic: str, count: str, each: str) -> float:
    """`count` transactional producers in threads, ten messages a transaction: transactions a second."""
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"}
    producers: list[Any] = [
        Producer({**settings, "transactional.id": f"t{time.time()}-{number}"}) for number in range(int(count))
    ]

    def one(producer: Any) -> None:
        producer.begin_transaction()
        for _ in range(10):
            producer.produce(topic, PAYLOAD)
        producer.commit_transaction()

    def work(producer: Any) -> None:
        for _ in range(int(each)):
            one(producer)

    for producer in producers:
        producer.init_transactions(60)
        one(producer)
    threads = [threading.Thread(target=work, args=(producer,)) for producer in producers]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(count) * int(each) / (time.perf_counter() - begun)


def end_to_end(servers: str, topic: str, count: str) -> list[float]:
    """Seconds from produce to the message in poll's hand, one after the other."""
    from confluent_kafka import Consumer, Producer

    producer: Any = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    consumer: Any = Consumer(
        {"bootstrap.servers": servers, "group.id": f"g{time.time()}", "auto.offset.reset": "earliest"}
    )
    producer.produce(topic, PAYLOAD)
    producer.flush()
    consumer.subscribe([topic])
    while not consumer.poll(1.0):
        pass
    times = []
    for _ in range(int(count)):
        begun = time.perf_counter()
        producer.produce(topic, PAYLOAD)
        producer.poll(0)
        while not consumer.poll(1.0):
            pass
        times.append(time.perf_counter() - begun)
    consumer.close()
    return times


MODES: dict[str, Callable[..., float | list[float]]] = {
    "produce": confluent_produce,
    "consume": confluent_consume,
    "python_produce": python_produce,
    "python_consume": python_consume,
    "one_at_a_time": one_at_a_time,
    "clients": clients,
    "transactions": transactions,
    "end_to_end": end_to_end,
}

if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    print(json.dumps(MODES[mode](*arguments)))
