"""The two services as processes, and how to let one die."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import tfmq
from examples.order_payment import accidents, payments, shop

IDLE_SECONDS = 1.0
PATIENCE_SECONDS = 90.0


class Where(NamedTuple):
    """Where the broker and the database are."""

    servers: str
    database: str


def sell(where: Where, number: int, accident: accidents.Accident | None = None) -> None:
    """A shop's process: one order."""
    accidents.prepare_accident(accident)
    with tfmq.Producer(where.servers) as producer, Session(create_engine(where.database)) as session:
        shop.place_order(session, producer, number, amount=100 + number)


def book(where: Where, accident: accidents.Accident | None = None) -> None:
    """A payment service's process: books what there is, or dies at the accident."""
    accidents.prepare_accident(accident)
    accidents.hurry()
    engine = create_engine(where.database)
    with tfmq.Producer(where.servers) as producer, payments.reader(where.servers) as consumer:
        tfmq.sql.check(producer, engine)  # the broker may have questions about a service that died
        # The first message is waited for: while the end of the one before is in doubt, nothing is handed out.
        for message in until_idle(consumer, first_seconds=PATIENCE_SECONDS):
            with Session(engine) as session:
                payments.book(session, producer, consumer, message)


def until_idle(consumer: tfmq.Consumer[Any], *, first_seconds: float = IDLE_SECONDS) -> Iterator[Any]:
    """Messages one by one, until there is none for `IDLE_SECONDS`."""
    seconds = first_seconds
    while found := consumer.poll(timeout=seconds, max_messages=1):
        yield found[0]
        seconds = IDLE_SECONDS


def in_process(work: Callable[..., None], *arguments: Any) -> None:
    """Do `work` in a process of its own, which must end as it should: well, or by the accident among `arguments`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    child = context.Process(target=work, args=arguments)
    child.start()
    child.join(PATIENCE_SECONDS)
    expected = -signal.SIGKILL if any(each in accidents.EACH for each in arguments) else 0
    if child.exitcode != expected:
        raise RuntimeError(f"{work.__name__}{arguments} ended with {child.exitcode}")
