"""Topic administration: create, grow, change, delete, resume, and METADATA.

Each step is durable before the next, so that the next start can finish or revert an interrupted change:

    create   catalog entry `create` durable -> folders created and durable -> entry `ready` durable -> reply
    grow     like create, with an entry `grow`; after a failure, another entry `grow` restores the old number
    delete   catalog entry `delete` durable -> parked fetches get an error -> folders renamed, data folder fsynced
             -> entry `gone` durable -> reply -> files deleted
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from journal.log.checkpoint import WrongLog
from tfmq.broker.catalog import Catalog, IdAllocator
from tfmq.broker.catalog_state import CREATE, DELETE, GONE, GROW, READY, SETTINGS
from tfmq.broker.partition import Partition
from tfmq.broker.partition_dirs import OpenedPartition, PartitionDirs
from tfmq.broker.reply import STOPPING, Reply, Run, Session, client_error, not_done_error, reply_when_done
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topic, Topics, metadata_row, no_partition, partition_state
from tfmq.config import DEFAULT, check_topic_keys, check_topic_settings
from tfmq.errors import NOT_DONE, UNKNOWN, BadRequest, Busy, NotAllowed, StorageStopped, TopicExists, UnknownTopic
from tfmq.protocol.commands import CreateTopic, DeleteTopic, GrowTopic, Metadata, ResumePartition, SetTopic
from tfmq.settings_table import TOPIC_KEYS

log = logging.getLogger("tfmq.broker")
audit = logging.getLogger("tfmq.audit")

CREATION_ONLY_KEY = "topics.partitions"
"""The key of a topic setting that has an effect only when the topic is created."""

ErrorCallback = Callable[[BaseException | None], None]


class TopicAdmin:
    """The topic commands. Changes of topics with the same name are made one after the other."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        topics: Topics,
        catalog: Catalog,
        leases: IdAllocator,
        folders: PartitionDirs,
        run: Run,
        deleted: Callable[[int], None],
        resumed: Callable[[int], None],
        created: Callable[[Topic], None],
    ) -> None:
        """`deleted(incarnation)` is called when the catalog entry for the deletion of a topic is durable.

        `resumed(log id)` is called when a partition accepts writes again, `created(topic)` when a topic was created or
        has grown.
        """
        self._runtime, self._topics = runtime, topics
        self._deleted, self._resumed, self._created = deleted, resumed, created
        self._catalog, self._leases, self._folders, self._run = catalog, leases, folders, run
        self._limits = runtime.limits
        self._changing: dict[str, list[Callable[[], None]]] = {}
        self._being_added: dict[str, int] = {}

    # METADATA

    def metadata(self, request: Metadata, reply: Reply, session: Session) -> None:
        """Create missing topics if requested. Then reply with the requested topics that exist.

        Raises UnknownTopic if a topic must be created, but the setting `topics.auto_create` is off.
        """
        names = sorted(self._topics) if request.topics is None else list(dict.fromkeys(request.topics))
        missing = [name for name in names if name not in self._topics]

        def fields() -> tuple[Any]:
            found = (self._topics[name] for name in names if name in self._topics)
            return (list(map(metadata_row, found)),)

        if not missing or not request.create:
            reply.ok(*fields())
            return
        if not self._runtime.config.topics.auto_create:
            raise UnknownTopic(
                f"There is no topic {missing[0]}, and topics.auto_create is off. Create it: tfmq topic create."
            )
        self._create_each(missing, session, reply_when_done(reply, fields))

    def _create_each(self, names: list[str], session: Session, then: ErrorCallback) -> None:
        remaining = len(names)
        failed: list[BaseException] = []

        def made(name: str, error: BaseException | None) -> None:
            nonlocal remaining
            remaining -= 1
            if error is None:
                count = self._topics.count(name)
                done = f"done, {count} partition{'' if count == 1 else 's'}"
                audit.info("create topic %s on first use, asked by %s: %s", name, session.identity, done)
            elif not isinstance(error, TopicExists):
                failed.append(error)
            if not remaining:
                then(failed[0] if failed else None)

        for name in names:
            self._create(name, self._runtime.partitions_default(name, {}), {}, partial(made, name))

    # CREATE_TOPIC

    def create(self, request: CreateTopic, reply: Reply) -> None:
        """Create a topic. Reply with its incarnation and number of partitions. Raises BadRequest (invalid settings)."""
        settings = check_topic_settings(request.settings)
        count = request.partitions
        if count is None:
            count = self._runtime.partitions_default(request.topic, settings)

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
        if self._folders.is_stopping:
            return Busy(STOPPING)
        if name in self._topics:
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
        """Create the partitions that the topic lacks. If that fails, revert the change by the catalog entry `undo`."""
        topic = self._catalog.state.topics[incarnation]
        new: list[str] = []

        def made(opened: list[OpenedPartition] | None, error: BaseException | None) -> None:
            if error is not None or opened is None:
                self._undo(new, undo, error, end)
                return

            def ready(error: BaseException | None) -> None:
                if error is not None:
                    # The catalog entry `create` or `grow` is durable: the next start finishes the change.
                    self._folders.abandon(opened)
                    end(client_error(error, UNKNOWN))
                    return
                topic = self._catalog.state.topics[incarnation]
                there = self._topics.get(topic.name) or Topic(topic, [])
                there.partitions.extend(self._folders.new_partition(topic, each) for each in opened)
                self._topics[topic.name] = there
                self.apply_settings(there)  # the configuration may have been reloaded while the logs were opened
                self._created(there)
                end(None)

            self._catalog.submit((READY, incarnation), ready)

        self._run(partial(self._folders.create_missing, topic, new), made)

    def _undo(self, new: list[str], undo: tuple[Any, ...], error: BaseException | None, end: ErrorCallback) -> None:
        """Delete the folders `new`, append the entry `undo` to the catalog, then call `end` with the client's error."""

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
        """Add partitions until the topic has the requested number. A number below the present one is rejected."""
        done = reply_when_done(reply, lambda: (len(self._topics.topic(request.topic).partitions),))
        self._grow(request.topic, request.partitions, done)

    def _grow(self, name: str, count: int, then: ErrorCallback) -> None:
        if name in self._changing:
            self._changing[name].append(lambda: self._grow(name, count, then))
            return
        topic = self._topics.get(name)
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

    # SET_TOPIC, and the settings of topics

    def set(self, request: SetTopic, reply: Reply) -> None:
        """Change the topic's own settings. Reply with them once they apply. Raises BadRequest (invalid setting)."""
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
        topic = self._topics.get(name)
        if topic is None or request.incarnation not in (0, topic.incarnation):
            then(UnknownTopic(f"There is no topic {name} of that incarnation."))
            return
        fixed = self.configured_settings(name)
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
            self.apply_settings(topic, has_archives=True)
            end(None)

        def submit() -> None:
            self._catalog.submit((SETTINGS, topic.incarnation, settings), _then(end, stored))

        def prepared(result: Any, error: BaseException | None) -> None:
            _then(end, submit)(None if error is None else not_done_error(error))

        # Create the archive folder first: without it the next start could not open the log.
        self._run(partial(self._folders.create_archives, topic, settings), prepared)

    def apply_settings(self, topic: Topic, *, has_archives: bool = False) -> None:
        """Apply the current settings of the topic to its logs.

        A worker first creates missing archive folders, unless `has_archives` says that all exist.
        """
        for partition in topic.partitions:
            if isinstance(partition, Partition):
                options = self._folders.log_options(topic.name, partition.number, topic.settings)
                if options == partition.log.options:
                    continue
                if has_archives or options.archive_folder is None:
                    partition.set_options(options)
                else:
                    self._apply_after_archive(topic, partition, options.archive_folder)

    def _apply_after_archive(self, topic: Topic, partition: Partition, folder: str) -> None:
        def made(result: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error(
                    "the settings of %s-%d stay as they were, its archive cannot be made: %s",
                    partition.name, partition.number, error,
                )  # fmt: skip
            elif not partition.deleted:
                # Read the settings again: they may have changed while the folder was created.
                partition.set_options(self._folders.log_options(topic.name, partition.number, topic.settings))

        self._run(partial(self._folders.create_archive, folder), made)

    def configured_settings(self, name: str) -> dict[str, str]:
        """Return key -> origin (where it is set) for each setting that the configuration fixes for a topic."""
        return {
            key: self._runtime.config.origins.get(f'topic."{name}".{key}', "configuration")
            for key in self._runtime.config.topic.get(name, {})
        }

    def effective_settings(self, topic: Topic) -> dict[str, list[Any]]:
        """Return key -> [value, origin] for each setting in effect for a topic. The origin: where the value is set."""
        values, fixed = self._runtime.settings(topic.name, topic.settings), self.configured_settings(topic.name)
        found = {}
        for key in TOPIC_KEYS:
            origin = "topic" if key in topic.settings else self._runtime.config.origins.get(key, DEFAULT)
            if key != CREATION_ONLY_KEY:
                found[key] = [values[key], fixed.get(key, origin)]
        return found

    # DELETE_TOPIC

    def delete(self, request: DeleteTopic, reply: Reply) -> None:
        """Delete a topic with its messages. Reply whether a topic with that name and incarnation existed."""

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
        topic = self._topics.get(name)
        if topic is None or incarnation not in (0, topic.incarnation):
            then(UnknownTopic(f"There is no topic {name} of that incarnation."))
            return
        end = self._begin_change(name, then)
        self._catalog.submit((DELETE, topic.incarnation), _then(end, partial(self._finish_deletion, topic, end)))

    def _finish_deletion(self, topic: Topic, end: ErrorCallback) -> None:
        del self._topics[topic.name]
        self._deleted(topic.incarnation)
        remaining = len(topic.partitions)

        def log_closed() -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                fields = (topic.name, topic.incarnation, len(topic.partitions))
                self._run(partial(self._folders.rename_deleted, *fields), aside)

        def aside(paths: list[str] | None, error: BaseException | None) -> None:
            if error is not None or paths is None:
                # The entry `delete` is durable: the next start renames the folders. Until then no topic gets this name.
                end(client_error(error or RuntimeError("no result"), UNKNOWN))
                return
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    partition.log.abandon("its topic was deleted")
            self._catalog.submit((GONE, topic.incarnation), partial(entry_written, paths))

        def entry_written(paths: list[str], error: BaseException | None) -> None:
            if error is not None:
                end(client_error(error, UNKNOWN))  # the next start completes the deletion
                return
            end(None)
            self._run(partial(self._folders.delete_renamed, paths), _raise_unless_os_error)

        for partition in topic.partitions:
            if isinstance(partition, Partition):
                partition.close_for_deletion(log_closed)
            else:
                log_closed()

    # RESUME_PARTITION

    def resume(self, request: ResumePartition, reply: Reply) -> None:
        """Resume a stopped partition, by recovery. Reply with its new state. Raises UnknownTopic, UnknownPartition."""
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
                self.apply_settings(topic)  # the settings may have changed while the log was opened
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
        """Begin a change of topic `name` that adds `added` partitions. Return the callback that ends the change."""
        self._changing[name] = []
        if added:
            self._being_added[name] = added
        return partial(self._end_change, name, then)

    def _end_change(self, name: str, then: ErrorCallback, error: BaseException | None) -> None:
        waiting = self._changing.pop(name)
        self._being_added.pop(name, None)
        then(error)
        for again in waiting:
            again()


def _then(end: ErrorCallback, proceed: Callable[[], None]) -> ErrorCallback:
    """Return a callback that calls `end(error)` if its argument is an error, or `proceed()` if its argument is None."""
    return lambda error: end(error) if error is not None else proceed()


def _raise_unless_os_error(result: Any, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, OSError):
        raise error
