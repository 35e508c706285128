"""Setup of `consumer.run`, shared by the blocking, asyncio and Twisted APIs.

Checks the arguments, opens the dead-letter store, and creates a `HandlerRunner` on the consumer's core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tfmq.client.connection.factory import state_folder_of
from tfmq.client.consumer.core import Consuming
from tfmq.client.consumer.options import OWN_STORE, ConsumerOptions
from tfmq.client.operation import Flag, Run
from tfmq.client.worker.dead_letter_store import DeadLetters
from tfmq.client.worker.listeners import Listener, Listeners, checked
from tfmq.client.worker.ordered_queues import ORDERS
from tfmq.client.worker.runner import Running
from tfmq.dead_letters import Retrying, open_dead_letters
from tfmq.errors import BadRequest, Closed

log = logging.getLogger("tfmq.consumer")

WORKERS_MAX: Final = 1000
"""More threads in one process only wait for each other."""


def begin_run(
    core: Consuming,
    listeners: Listeners,
    listener: Listener | None,
    *,
    workers: int,
    order: str,
    tracebacks: bool = True,
    beside: Run,
    wall_clock: Callable[[], float],
    raise_flag: Callable[[Flag], None] = Flag.settle,
) -> Running:
    """Create a run that has no workers yet.

    `beside` runs the store's work in other threads; `raise_flag` wakes waiting threads. Raises BadRequest for
    invalid arguments, Closed for a closed consumer.
    """
    options = core.options
    if core.closed:
        raise Closed("The consumer is closed, as it always is after a run; make a new one.")
    core.positions.ledgers.check_free()
    if type(workers) is not int or not 1 <= workers <= WORKERS_MAX:
        raise BadRequest(
            f"workers={workers!r} is no number of workers; it takes one from 1 to {WORKERS_MAX}."
        )
    if order not in ORDERS:
        words = ", ".join(f'"{each}"' for each in ORDERS)
        raise BadRequest(f"order={order!r} is not known; it takes {words}.")
    if options.commits == "before" and order != "partition":
        raise BadRequest(
            'commits="before" needs order="partition": an offset cannot be saved before one message and after another.'
        )
    if listener is not None:
        listeners.default = checked(listener)
    listeners.check(options.subscription.asked() or (), options.subscription.reads)
    store = open_store(options, beside, core, wall_clock)
    running = Running(
        core, store, order=order, tracebacks=tracebacks, wall_clock=wall_clock, raise_flag=raise_flag
    )
    if store is not None:
        # the path of the default store is not known before the client is connected
        if options.dead_letters != OWN_STORE:
            log.info("Dead letters of group %s are kept in %s.", options.group, store.address)
        running.retry_loop = Retrying(store, running.again, now=core.link.now, wall_clock=wall_clock)
    core.positions.ledgers.running = True
    return running


def open_store(
    options: ConsumerOptions, beside: Run, core: Consuming, wall_clock: Callable[[], float]
) -> DeadLetters | None:
    """Open the dead-letter store of the consumer's options; None if it has none.

    Raises BadRequest.
    """
    where = options.dead_letters
    if where is None or (options.group is None and where == OWN_STORE):
        return None
    if options.group is None:
        raise BadRequest("dead_letters= needs a group: the dead letters of a store belong to a group.")
    return open_dead_letters(
        where,
        group=options.group,
        calls_max=options.retries + 1,
        codec=options.codec,
        run=beside,
        link=core.link,
        wall_clock=wall_clock,
        folder=state_folder_of(core.link),
    )
