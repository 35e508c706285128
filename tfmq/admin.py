"""The blocking admin client. The asyncio variant is in `tfmq.aio`, the Twisted variant in `tfmq.twisted`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from tfmq.client.admin.admin import AdminCore
from tfmq.client.api_variants import blocking, name_methods
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.drivers.blocking import BlockingDriver


@name_methods
class Admin:
    """The operations of the command line, as methods.

        with tfmq.Admin("127.0.0.1:8367") as admin:
            admin.create_topic("orders", partitions=4)
            admin.topic("orders").partitions

    The constructor does not connect. `timeout`: how many seconds a method waits for each reply; `client_id`: the
    name of this client in the broker's log; `standby`: stay at a server also if it is a standby, which can only be
    asked for `status` and `ping`, and promoted. All methods raise the `TfmqError` of the broker's reply,
    `ConnectionFailed` if no broker is reached, and `TimedOut` if no reply arrives in time.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
        standby: bool = False,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, BlockingDriver, client_id=client_id, operator=True)
        self._driver.link.accepts_standby = standby
        self._core = AdminCore(self._driver.link, timeout)

    ping = blocking(AdminCore.ping)
    status = blocking(AdminCore.status)
    promote_replica = blocking(AdminCore.promote_replica)
    topics = blocking(AdminCore.topics)
    topic = blocking(AdminCore.topic)
    create_topic = blocking(AdminCore.create_topic)
    grow_topic = blocking(AdminCore.grow_topic)
    set_topic = blocking(AdminCore.set_topic)
    delete_topic = blocking(AdminCore.delete_topic)
    resume = blocking(AdminCore.resume)
    truncate_before = blocking(AdminCore.truncate_before)
    purge = blocking(AdminCore.purge)
    locate = blocking(AdminCore.locate)
    trace = blocking(AdminCore.trace)
    trace_delayed = blocking(AdminCore.trace_delayed)
    find_key = blocking(AdminCore.find_key)
    groups = blocking(AdminCore.groups)
    group = blocking(AdminCore.group)
    reset_group = blocking(AdminCore.reset_group)
    delete_group = blocking(AdminCore.delete_group)
    transactions = blocking(AdminCore.transactions)
    transaction = blocking(AdminCore.transaction)
    commit_transaction = blocking(AdminCore.commit_transaction)
    rollback_transaction = blocking(AdminCore.rollback_transaction)
    forget_transaction = blocking(AdminCore.forget_transaction)
    commit_groups = blocking(AdminCore.commit_groups)
    commit_group = blocking(AdminCore.commit_group)
    abort_commit_group = blocking(AdminCore.abort_commit_group)
    forget_commit_group = blocking(AdminCore.forget_commit_group)
    delayed = blocking(AdminCore.delayed)
    delayed_histogram = blocking(AdminCore.delayed_histogram)
    describe_delayed = blocking(AdminCore.describe_delayed)
    cancel = blocking(AdminCore.cancel)
    reschedule = blocking(AdminCore.reschedule)
    schedule = blocking(AdminCore.schedule)
    schedules = blocking(AdminCore.schedules)
    describe_schedule = blocking(AdminCore.describe_schedule)
    pause_schedule = blocking(AdminCore.pause_schedule)
    resume_schedule = blocking(AdminCore.resume_schedule)
    remove_schedule = blocking(AdminCore.remove_schedule)

    def close(self) -> None:
        """Close the connection."""
        self._driver.close()

    def __repr__(self) -> str:
        return describe_client(self, self._driver.link.servers)

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
