"""Setup of `consumer.run`, shared by the blocking, asyncio and Twisted APIs.

Checks the arguments, opens the dead-letter store, and creates a `HandlerRunner` on the consumer's core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tfmq.client.connection.factory import in_process_state_folder
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.options import DEFAULT_STORE, ConsumerOptions
from tfmq.client.operation import Event, Executor
from tfmq.client.worker.dead_letter_store import DeadLetterStore
from tfmq.client.worker.listeners import Listener, Listeners, check_listener
from tfmq.client.worker.ordered_queues import ORDERS
from tfmq.client.worker.runner import HandlerRunner
from tfmq.dead_letters import Retrying, open_dead_letters
from tfmq.errors import BadRequest, Closed

log = logging.getLogger("tfmq.consumer")

WORKERS_MAX: Final = 1000
"""More threads in one process only wait for each other."""


def create_run(
    core: ConsumerCore,
    listeners: Listeners,
    listener: Listener | None,
    *,
    workers: int,
    order: str,
    tracebacks: bool = True,
    beside: Executor,
    wall_clock: Callable[[], float],
    raise_flag: Callable[[Event], None] = Event.complete,
) -> HandlerRunner:
    """Create a run that has no workers yet.

    `beside` runs the store's work in other threads; `raise_flag` wakes waiting threads. Raises BadRequest for
    invalid arguments, Closed for a closed consumer.
    """
    options = core.options
    if core.closed:
        raise Closed("The consumer is closed, as it always is after a run; make a new one.")
    core.positions.ack_trackers.raise_if_run_active()
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
        listeners.default = check_listener(listener)
    listeners.check(options.subscription.topics_to_request() or (), options.subscription.reads)
    store = open_dead_letter_store(options, beside, core, wall_clock)
    running = HandlerRunner(
        core, store, order=order, tracebacks=tracebacks, wall_clock=wall_clock, raise_flag=raise_flag
    )
    if store is not None:
        # the path of the default store is not known before the client is connected
        if options.dead_letters != DEFAULT_STORE:
            log.info("Dead letters of group %s are kept in %s.", options.group, store.address)
        running.retry_loop = Retrying(store, running.redeliver, now=core.link.now, wall_clock=wall_clock)
    core.positions.ack_trackers.is_run_active = True
    return running


def open_dead_letter_store(
    options: ConsumerOptions, beside: Executor, core: ConsumerCore, wall_clock: Callable[[], float]
) -> DeadLetterStore | None:
    """Open the dead-letter store of the consumer's options; None if it has none, or no group.

    Raises BadRequest.
    """
    where = options.dead_letters
    if where is None or options.group is None:
        return None
    return open_dead_letters(
        where,
        group=options.group,
        calls_max=options.retries + 1,
        codec=options.codec,
        run=beside,
        link=core.link,
        wall_clock=wall_clock,
        folder=in_process_state_folder(core.link),
    )
