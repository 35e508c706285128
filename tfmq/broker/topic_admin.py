"""Topic administration: create, grow, change, delete, resume, and METADATA.

Each step is durable before the next, so that the next start finishes or reverts an interrupted change:

    create   entry `create` durable -> folders created and durable -> entry `ready` durable -> reply
    grow     likewise with `grow`; on failure, `grow` back to the current number
    delete   entry `delete` durable -> parked fetches get an error -> folders renamed, data folder fsynced
             -> entry `gone` durable -> reply -> files deleted
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from journal.log.checkpoint import WrongLog
from tfmq.broker.catalog import Catalog, IdAllocator
from tfmq.broker.catalog_state import CREATE, DELETE, GONE, GROW, READY, SETTINGS
from tfmq.broker.partition import Partition
from tfmq.broker.partition_dirs import OpenedPartition, PartitionDirs
from tfmq.broker.reply import STOPPING, Reply, Run, Session, client_error, not_done_error, reply_when_done
from tfmq.broker.topics import Topic, Topics, metadata_row, no_partition, partition_state
from tfmq.config import check_topic_keys, check_topic_settings
from tfmq.errors import NOT_DONE, UNKNOWN, BadRequest, Busy, NotAllowed, StorageStopped, TopicExists, UnknownTopic
from tfmq.protocol.commands import CreateTopic, DeleteTopic, GrowTopic, Metadata, ResumePartition, SetTopic

log = logging.getLogger("tfmq.broker")

CREATION_ONLY_KEY = "topics.partitions"
"""A key that only applies when a topic is created."""

ErrorCallback = Callable[[BaseException | None], None]


class TopicAdmin:
    """Topic commands.

    Changes of one topic name are made one after the other; each checks its preconditions when its turn comes.
    """

    def __init__(
        self,
        *,
        topics: Topics,
        catalog: Catalog,
        leases: IdAllocator,
        folders: PartitionDirs,
        run: Run,
        limits: Mapping[str, int],
        partitions_default: Callable[[str, Mapping[str, Any]], int],
        auto_create: Callable[[], bool],
        deleted: Callable[[int], None],
        resumed: Callable[[int], None],
        created: Callable[[Topic], None],
        apply: Callable[..., None],
        configured: Callable[[str], Mapping[str, str]],
    ) -> None:
        """Callbacks for changes of topics.

        `deleted(incarnation)` is called when a deletion is in the catalog, `resumed(log id)` when a partition accepts
        writes again, `created(topic)` when a topic was created or has grown, `apply(topic)` when its settings may
        differ from those of its logs. `configured(name)` returns the settings that the configuration fixes for the
        topic, with their origins.
        """
        self._topics = topics
        self._deleted, self._resumed, self._created = deleted, resumed, created
        self._apply, self._configured = apply, configured
        self._catalog, self._leases, self._folders, self._run = catalog, leases, folders, run
        self._limits = limits
        self._partitions_default, self._auto_create = partitions_default, auto_create
        self._changing: dict[str, list[Callable[[], None]]] = {}
        self._being_added: dict[str, int] = {}

    # METADATA

    def metadata(self, request: Metadata, reply: Reply, session: Session) -> None:
        """Reply with the requested topics.

        Missing ones are created if the request asks for it and it is allowed.

        Raises UnknownTopic.
        """
        names = self._topics.names() if request.topics is None else list(dict.fromkeys(request.topics))
        missing = [name for name in names if self._topics.find(name) is None]

        def fields() -> tuple[Any]:
            found = (topic for name in names if (topic := self._topics.find(name)) is not None)
            return (list(map(metadata_row, found)),)

        if not missing or not request.create:
            reply.ok(*fields())
            return
        if not self._auto_create():
            raise UnknownTopic(
                f"There is no topic {missing[0]}, and topics.auto_create is off. Create it: tfmq topic create."
            )
        self._create_each(missing, session, reply_when_done(reply, fields))

    def _create_each(self, names: list[str], session: Session, then: ErrorCallback) -> None:
        """Create the topics that do not exist, then call `then(first error)`."""
        left = len(names)
        failed: list[BaseException] = []

        def made(name: str, error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if error is None:
                count = self._topics.count(name)
                log.info(
                    "create topic %s on first use, asked by %s: done, %d partitions",
                    name, session.identity, count,
                )  # fmt: skip
            elif not isinstance(error, TopicExists):
                failed.append(error)
            if not left:
                then(failed[0] if failed else None)

        for name in names:
            self._create(name, self._partitions_default(name, {}), {}, partial(made, name))

    # CREATE_TOPIC

    def create(self, request: CreateTopic, reply: Reply) -> None:
        """Create a topic. Raises BadRequest."""
        settings = check_topic_settings(request.settings)
        count = request.partitions
        if count is None:
            count = self._partitions_default(request.topic, settings)

        def fields() -> tuple[int, int]:
            topic = self._topics.topic(request.topic)
            return topic.incarnation, len(topic.partitions)

        self._create(request.topic, count, settings, reply_when_done(reply, fields))

    def _create(self, name: str, count: int, settings: dict[str, Any], then: ErrorCallback) -> None:
        if name in self._changing:
            self._changing[name].append(lambda: self._create(name, count, settings, then))
            return
        refusal = self._creation_error(name, count)
        if refusal is not None:
            then(refusal)
            return
        end = self._begin_change(name, then, added=count)

        def leased(incarnation: int, error: BaseException | None) -> None:
            if error is not None:
                end(error)
                return
            entry = (CREATE, name, incarnation, count, settings)
            self._catalog.submit(
                entry, _then(end, partial(self._create_partitions, incarnation, (GONE, incarnation), end))
            )

        self._leases.allocate(1, leased)

    def _creation_error(self, name: str, count: int) -> BaseException | None:
        """Return why the topic cannot be created; None if it can."""
        if self._folders.is_stopping:
            return Busy(STOPPING)
        if self._topics.find(name) is not None:
            return TopicExists(f"There is a topic {name} already.")
        if any(each.name == name for each in self._catalog.state.topics.values()):
            return StorageStopped(
                f"An earlier change of the topic {name} could not be finished. The next start of the broker does it.",
                outcome=NOT_DONE,
            )
        if len(self._topics) + len(self._being_added) >= self._limits["topics"]:
            return NotAllowed(f"The broker has {len(self._topics)} topics, its limit (limits.topics).")
        return self._limit_error(count, 0)

    def _limit_error(self, count: int, present: int) -> BaseException | None:
        if count > self._limits["partitions_per_topic"]:
            most = self._limits["partitions_per_topic"]
            return BadRequest(f"{count} partitions are above the limit of {most} (limits.partitions_per_topic).")
        total = self._topics.partition_count() + sum(self._being_added.values())
        if total + count - present > self._limits["partitions"]:
            return NotAllowed(f"The broker has {total} partitions; its limit is limits.partitions.")
        return None

    def _create_partitions(self, incarnation: int, undo: tuple[Any, ...], end: ErrorCallback) -> None:
        """Create the missing partitions, then append the entry `ready` to the catalog.

        If they cannot be created, revert the change with the entry `undo`.
        """
        topic = self._catalog.state.topics[incarnation]
        new: list[str] = []

        def made(opened: list[OpenedPartition] | None, error: BaseException | None) -> None:
            if error is not None or opened is None:
                self._undo(new, undo, error, end)
                return

            def ready(error: BaseException | None) -> None:
                if error is not None:
                    # The entry `create` or `grow` is durable: the next start finishes the change.
                    self._folders.abandon(opened)
                    end(client_error(error, UNKNOWN))
                    return
                topic = self._catalog.state.topics[incarnation]
                there = self._topics.find(topic.name) or Topic(topic, [])
                there.partitions.extend(self._folders.new_partition(topic, each) for each in opened)
                self._topics.add(there)
                self._apply(there)  # the configuration may have been reloaded while the logs were opened
                self._created(there)
                end(None)

            self._catalog.submit((READY, incarnation), ready)

        self._run(partial(self._folders.create_missing, topic, new), made)

    def _undo(self, new: list[str], undo: tuple[Any, ...], error: BaseException | None, end: ErrorCallback) -> None:
        """Delete the folders `new`, append the entry `undo` to the catalog, then call `end(error)`.

        The outcome of the error is "unknown" if that fails.
        """

        def removed(result: Any, failure: BaseException | None) -> None:
            if failure is not None:
                end(client_error(error or failure, UNKNOWN))
                return
            self._catalog.submit(undo, undone)

        def undone(failure: BaseException | None) -> None:
            cause = error or RuntimeError("making folders ended without a result")
            if isinstance(cause, WrongLog):
                cause = NotAllowed(
                    "A folder of that name in the broker's data belongs to no topic it knows. Move it away, or choose"
                    " another name."
                )
            end(client_error(cause, NOT_DONE if failure is None else UNKNOWN))

        self._run(partial(self._folders.delete_created, new), removed)

    # GROW_TOPIC

    def grow(self, request: GrowTopic, reply: Reply) -> None:
        """Add partitions, up to the requested number.

        A number below the current one is rejected; the current one changes nothing.
        """
        done = reply_when_done(reply, lambda: (len(self._topics.topic(request.topic).partitions),))
        self._grow(request.topic, request.partitions, done)

    def _grow(self, name: str, count: int, then: ErrorCallback) -> None:
        if name in self._changing:
            self._changing[name].append(lambda: self._grow(name, count, then))
            return
        topic = self._topics.find(name)
        if topic is None:
            then(UnknownTopic(f"There is no topic {name}."))
            return
        present = len(topic.partitions)
        if count <= present:
            then(None if count == present else NotAllowed(
                f"The topic {name} has {present} partitions, and partitions are never removed, because "
                "their messages would be lost. Create a new topic with fewer."
            ))  # fmt: skip
            return
        refusal = self._limit_error(count, present)
        if refusal is not None:
            then(refusal)
            return
        end = self._begin_change(name, then, added=count - present)
        undo = (GROW, topic.incarnation, present)
        self._catalog.submit(
            (GROW, topic.incarnation, count), _then(end, partial(self._create_partitions, topic.incarnation, undo, end))
        )

    # SET_TOPIC

    def set(self, request: SetTopic, reply: Reply) -> None:
        """Change the topic's own settings. The reply is sent once they are durable and in effect.

        Raises BadRequest, NotAllowed.
        """
        changed = check_topic_settings(request.settings)
        check_topic_keys(request.unset)
        if CREATION_ONLY_KEY in (*changed, *request.unset):
            raise BadRequest(
                f"{CREATION_ONLY_KEY} says how many partitions a new topic gets, and {request.topic} is there:"
                " tfmq topic grow gives it more."
            )
        done = reply_when_done(reply, lambda: (self._topics.topic(request.topic).settings,))
        self._set(request, changed, done)

    def _set(self, request: SetTopic, changed: dict[str, Any], then: ErrorCallback) -> None:
        name = request.topic
        if name in self._changing:
            self._changing[name].append(lambda: self._set(request, changed, then))
            return
        topic = self._topics.find(name)
        if topic is None or request.incarnation not in (0, topic.incarnation):
            then(UnknownTopic(f"There is no topic {name} of that incarnation."))
            return
        fixed = self._configured(name)
        for key in (*changed, *request.unset):
            if key in fixed:
                then(NotAllowed(
                    f"{key} of the topic {name} is set where the server is configured ({fixed[key]}), which comes"
                    " first: change it there, then send the server SIGHUP."
                ))  # fmt: skip
                return
        settings = {key: value for key, value in topic.settings.items() if key not in request.unset} | changed
        end = self._begin_change(name, then)

        def stored() -> None:
            topic.settings = settings
            self._apply(topic, has_archives=True)
            end(None)

        def submit() -> None:
            self._catalog.submit((SETTINGS, topic.incarnation, settings), _then(end, stored))

        def prepared(result: Any, error: BaseException | None) -> None:
            _then(end, submit)(None if error is None else not_done_error(error))

        # Create the archive folder first: without it the next start could not open the log.
        self._run(partial(self._folders.create_archives, topic, settings), prepared)

    # DELETE_TOPIC

    def delete(self, request: DeleteTopic, reply: Reply) -> None:
        """Delete a topic with its messages. Reply whether one of that incarnation existed."""

        def deleted(error: BaseException | None) -> None:
            if isinstance(error, UnknownTopic):
                reply.ok(False)
            else:
                reply_when_done(reply, lambda: (True,))(error)

        self._delete(request.topic, request.incarnation, deleted)

    def _delete(self, name: str, incarnation: int, then: ErrorCallback) -> None:
        if name in self._changing:
            self._changing[name].append(lambda: self._delete(name, incarnation, then))
            return
        topic = self._topics.find(name)
        if topic is None or incarnation not in (0, topic.incarnation):
            then(UnknownTopic(f"There is no topic {name} of that incarnation."))
            return
        end = self._begin_change(name, then)
        self._catalog.submit((DELETE, topic.incarnation), _then(end, partial(self._finish_deletion, topic, end)))

    def _finish_deletion(self, topic: Topic, end: ErrorCallback) -> None:
        """Finish a deletion whose entry `delete` is durable.

        Removes the topic from the table, fails its parked fetches, deletes its folders.
        """
        self._topics.remove(topic)
        self._deleted(topic.incarnation)
        left = len(topic.partitions)

        def retired() -> None:
            nonlocal left
            left -= 1
            if not left:
                fields = (topic.name, topic.incarnation, len(topic.partitions))
                self._run(partial(self._folders.rename_deleted, *fields), aside)

        def aside(paths: list[str] | None, error: BaseException | None) -> None:
            if error is not None or paths is None:
                # The entry `delete` is durable: the next start renames the folders. Until then the name stays in use.
                end(client_error(error or RuntimeError("no result"), UNKNOWN))
                return
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    partition.log.abandon("its topic was deleted")
            self._catalog.submit((GONE, topic.incarnation), partial(gone, paths))

        def gone(paths: list[str], error: BaseException | None) -> None:
            if error is not None:
                end(client_error(error, UNKNOWN))  # the next start completes the change
                return
            end(None)
            self._run(partial(self._folders.delete_renamed, paths), _raise_unless_os_error)

        for partition in topic.partitions:
            if isinstance(partition, Partition):
                partition.close_for_deletion(retired)
            else:
                retired()

    # RESUME_PARTITION

    def resume(self, request: ResumePartition, reply: Reply) -> None:
        """Resume a stopped partition, with recovery.

        Reply with its state. Raises UnknownTopic, UnknownPartition.
        """
        topic = self._topics.topic(request.topic)
        if request.partition >= len(topic.partitions):
            raise no_partition(topic, request.partition)
        found = topic.partitions[request.partition]

        def resumed(result: Any, error: BaseException | None) -> None:
            if error is not None:
                reply.error(not_done_error(error))
                return
            if isinstance(result, Partition):
                topic.partitions[request.partition] = result
                self._apply(topic)  # the settings may have changed while the log was opened
            now = topic.partitions[request.partition]
            if isinstance(now, Partition):
                now.wake_parked()
                self._resumed(now.log.log_id)
            reply.ok(partition_state(now))

        if not isinstance(found, Partition):
            row = self._catalog.state.topics[topic.incarnation]
            self._run(partial(self._folders.open_or_reason, row, request.partition), resumed)
        elif found.log.stopped is None:
            reply.ok(found.state)
        else:
            found.resume(resumed)

    def _begin_change(self, name: str, then: ErrorCallback, added: int = 0) -> ErrorCallback:
        """Begin a change that adds `added` partitions. Return the callback that ends it."""
        self._changing[name] = []
        if added:
            self._being_added[name] = added
        return partial(self._end_change, name, then)

    def _end_change(self, name: str, then: ErrorCallback, error: BaseException | None) -> None:
        """End a change: call its caller, then start the changes that waited for it."""
        waiting = self._changing.pop(name)
        self._being_added.pop(name, None)
        then(error)
        for again in waiting:
            again()


def _then(end: ErrorCallback, go_on: Callable[[], None]) -> ErrorCallback:
    """Return a callback that calls `go_on()`, or `end(error)` if it gets an error."""
    return lambda error: end(error) if error is not None else go_on()


def _raise_unless_os_error(result: Any, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, OSError):
        raise error
