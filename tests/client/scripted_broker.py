"""A broker in memory and a driver with a clock of its own: what consumers are tested against without a socket."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from journal.record.format import tag_hash
from tests.client.blocks import INCARNATION, Bytes
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection, PendingRequest
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.options import ConsumerOptions, check_arguments
from tfmq.client.operation import NEVER, CallUserCode, Operation
from tfmq.consumer import Consumer
from tfmq.errors import Abandoned, ConnectionFailed, Fenced, OffsetOutOfRange, TfmqError, UnknownTopic
from tfmq.protocol import commands as wire

STEPS_MAX = 100_000


def consumer_options(**arguments: Any) -> ConsumerOptions:
    """The options of a consumer with these arguments, and the defaults of the others."""
    given = signature(Consumer).bind(**arguments)
    given.apply_defaults()
    return check_arguments(given.arguments)


class Broker:
    """Topics, groups and waiting fetches. `fail` maps a request's class to errors for the next ones of it."""

    def __init__(self) -> None:
        self.topics: dict[str, tuple[int, list[Bytes]]] = {}
        self.groups: dict[str, tuple[int, str]] = {}
        self.live: dict[str, str] = {}
        self.wishes: dict[str, Any] = {}
        self.given: dict[str, dict[tuple[str, int, int], int]] = {}
        self.held: dict[str, dict[tuple[str, int, int], bool]] = {}
        self.thieves: set[str] = set()
        self.note = ""
        self.stolen: set[tuple[str, int, int]] = set()
        """Partitions that another member has, although this one does not know it yet."""
        self.offsets: dict[str, dict[tuple[str, int], wire.SavedOffset]] = {}
        self.grown: dict[str, int] = {}
        """Topics of which the next fetch that waits is answered, to report that they have grown."""
        self.fail: dict[type, list[TfmqError]] = {}
        self.requests: list[Any] = []
        self.parked: list[PendingRequest] = []
        self.made = 0
        self.down = False

    def create(self, topic: str, partitions: int = 1, incarnation: int | None = None) -> Bytes:
        self.made += 1
        incarnation = incarnation or INCARNATION + self.made
        self.topics[topic] = (incarnation, [Bytes(n, incarnation) for n in range(partitions)])
        return self.topics[topic][1][0]

    def grow(self, topic: str) -> Bytes:
        incarnation, logs = self.topics[topic]
        logs.append(Bytes(len(logs), incarnation))
        self.grown[topic] = len(logs)
        return logs[-1]

    def log(self, topic: str, incarnation: int, partition: int) -> Bytes:
        known = self.topics.get(topic)
        if known is None or known[0] != incarnation or partition >= len(known[1]):
            raise UnknownTopic()
        return known[1][partition]

    def sent(self, kind: type) -> list[Any]:
        return [request for request in self.requests if type(request) is kind]

    def answer(self, call: PendingRequest) -> tuple[Any, bytes] | None:
        """The reply and its body; None: later. Raises what becomes an error reply."""
        request = call.request
        handler: Callable[..., Any] = getattr(self, f"on_{type(request).__name__.lower()}")
        reply = handler(request)
        return reply if reply is None or type(reply) is tuple else (reply, b"")

    def on_metadata(self, request: wire.Metadata) -> Any:
        return wire.MetadataReply(
            [
                wire.TopicRow(name, inc, [wire.PartitionRow(n, "open") for n in range(len(logs))], {})
                for name, (inc, logs) in self.topics.items()
                if request.topics is None or name in request.topics
            ]
        )

    def on_fetch(self, request: wire.Fetch) -> Any:
        log = self.log(request.topic, request.incarnation, request.partition)
        if not log.first <= request.offset <= log.end:
            raise OffsetOutOfRange(first=log.first, end=log.end)
        if request.offset == log.end and not self.grown.pop(request.topic, 0):
            return None
        start, following, body = log.read(request.offset, request.max_bytes)
        if request.tags is not None:
            kept = [p for p in log.pieces if start <= p.offset < following and self._matches(p.data, request.tags)]
            body = b"".join(piece.data for piece in kept)
        count = len(self.topics[request.topic][1])
        fields = (start, request.offset, following, log.epoch, log.end, log.end, log.first, log.log_id, count)
        return wire.FetchReply(*fields), body

    @staticmethod
    def _matches(data: bytes, hashes: list[int]) -> bool:
        return any(int.from_bytes(data[16:18], "big") == each for each in hashes)

    def on_cancel(self, request: wire.Cancel) -> Any:
        return wire.CancelReply(True)

    def on_locate(self, request: wire.Locate) -> Any:
        log = self.log(request.topic, request.incarnation, request.partition)
        offset, ordinal = self._find(log, request.by, request.value)
        return wire.LocateReply(offset, ordinal, log.epoch, log.first, log.end, log.end, log.ordinal)

    @staticmethod
    def _find(log: Bytes, by: int, value: int) -> tuple[int, int]:
        """Blocks are as fine as it gets here."""
        first, places = log.pieces[0].offset if log.pieces else log.end, []
        ordinal = 0
        for piece in log.pieces:
            places.append((piece.offset, ordinal))
            ordinal += piece.records
        places.append((log.end, log.ordinal))
        if by == wire.BY_EARLIEST:
            return first, 0
        if by == wire.BY_LATEST:
            return log.end, log.ordinal
        key = 1 if by == wire.BY_ORDINAL else 0
        return [place for place in places if place[key] <= value][-1]

    def on_joingroup(self, request: wire.JoinGroup) -> Any:
        generation = self.groups.get(request.group, (0, ""))[0] + 1
        member = request.member or f"member-{generation}"
        self.groups[request.group] = (generation, member)
        self.live[request.group] = member
        self.wishes[request.group] = request
        self.given[request.group] = {}
        grants = [wire.GrantedPartition(*name, grant) for name, grant in self.share(request.group).items()]
        return wire.JoinGroupReply(member, generation, grants, self.note)

    def _grants(self, wishes: Any, generation: int) -> list[wire.GrantedPartition]:
        """All that a member asks for is its."""
        return [
            wire.GrantedPartition(name, inc, number, generation)
            for name, (inc, logs) in self.topics.items()
            for number in range(len(logs))
            if name in wishes.topics and (wishes.only is None or (name, number) in wishes.only)
        ]

    def take_over(self, group: str) -> None:
        """The member was taken for dead, and another one has everything from now on."""
        self.groups[group] = (self.groups[group][0] + 1, "thief")
        self.live[group] = "thief"
        self.thieves.add(group)

    def share(self, group: str) -> dict[tuple[str, int, int], int]:
        """What the one member has now, with the grants."""
        wishes = self.wishes[group]
        known = self.given.setdefault(group, {})
        found = [] if group in self.thieves else self._grants(wishes, self.groups[group][0])
        names = {(each.topic, each.incarnation, each.partition): each.grant for each in found}
        share = {name: known.get(name, grant) for name, grant in names.items()}
        self.given[group] = {**known, **share}
        return share

    def _require(self, request: Any) -> None:
        generation, member = self.groups.get(request.group, (0, ""))
        if member != request.member or request.generation > generation:
            raise Fenced()

    def on_heartbeat(self, request: wire.Heartbeat) -> Any:
        """At once where the share is not what the member knows; else None: it waits."""
        self._require(request)
        if request.subscription is not None:
            self.wishes[request.group] = request.subscription
        generation = self.groups[request.group][0]
        share = self.share(request.group)
        self.held[request.group] = {
            (each.topic, each.incarnation, each.partition): each.leaving for each in request.held
        }
        known = {name for name, leaving in self.held[request.group].items() if not leaving}
        for name in [name for name in self.given[request.group] if name not in self.held[request.group]]:
            if name not in share:
                del self.given[request.group][name]
        if known == share.keys():
            return None
        grants = [wire.GrantedPartition(*name, grant) for name, grant in share.items()]
        return wire.HeartbeatReply(generation, grants, self.note)

    def on_leavegroup(self, request: wire.LeaveGroup) -> Any:
        self._require(request)
        self.live.pop(request.group)
        return wire.LeaveGroupReply(True)

    def on_commitoffsets(self, request: wire.CommitOffsets) -> Any:
        self._require(request)
        kept = self.offsets.setdefault(request.group, {})
        given, fenced = self.given[request.group], []
        for each in request.offsets:
            grant = given.get(each[:3])
            if grant is None or grant > request.generation or each[:3] in self.stolen:
                fenced.append(wire.PartitionName(each.topic, each.partition))
            else:
                kept[each.topic, each.partition] = wire.SavedOffset(*each, request.generation)
        if fenced and len(fenced) == len(request.offsets):
            raise Fenced()
        return wire.CommitOffsetsReply(len(request.offsets) - len(fenced), fenced)

    def on_readoffsets(self, request: wire.ReadOffsets) -> Any:
        kept = self.offsets.get(request.group, {})
        names = [tuple(each) for each in request.partitions or kept]
        return wire.ReadOffsetsReply([kept[name] for name in names if name in kept])

    def saved(self, group: str, topic: str = "orders", partition: int = 0) -> int | None:
        found = self.offsets.get(group, {}).get((topic, partition))
        return None if found is None else found.offset


class ScriptedLink(ClientConnection):
    """A link whose other end is a `Broker`; its clock is moved by `Script`."""

    def __init__(self, broker: Broker) -> None:
        self.time = 1000.0
        super().__init__(parse_servers("127.0.0.1:1"), lambda: self.time)
        self.broker = broker
        self.open: list[PendingRequest] = []
        self.sent_at: dict[int, float] = {}

    def send_request(self, request: Any, *body: Any, seconds: float | None = 30.0, **options: Any) -> PendingRequest:
        deadline = NEVER if seconds is None else self.time + seconds
        number = len(self.broker.requests) + 1
        call = PendingRequest(request, wire.BY_REQUEST[type(request)], body, number, deadline)
        call.sent = True
        self.sent_at[call.correlation_id] = self.time
        self.broker.requests.append(request)
        self.open.append(call)
        return call

    def abandon(self, call: PendingRequest, error: TfmqError | None = None) -> None:
        if not call.done:
            self.end(call, error or Abandoned())

    def end(self, call: PendingRequest, error: TfmqError | None = None) -> None:
        if call in self.open:  # else it was the parent's, before a fork
            self.open.remove(call)
        call.error = error
        call.complete()

    def serve(self) -> None:
        """The broker answers all that it can."""
        if self.broker.down:
            for call in list(self.open):
                if call.deadline <= self.time or not self.connection_count:
                    self.end(call, ConnectionFailed())
            return
        self.state, self.connection_count = "ready", self.connection_count or 1
        for call in list(self.open):
            if call.done:
                continue
            planted = self.broker.fail.get(type(call.request))
            try:
                if planted:
                    raise planted.pop(0)
                answer = self.broker.answer(call)
            except TfmqError as error:
                self.end(call, error)
                continue
            if answer is not None:
                call.reply, call.reply_body = answer[0], memoryview(answer[1])
                self.end(call)
            elif self.due(call) <= self.time:
                request = call.request
                if isinstance(request, wire.Heartbeat):
                    call.reply = wire.HeartbeatReply(self.broker.groups[request.group][0], None, self.broker.note)
                    self.end(call)
                    continue
                log = self.broker.log(request.topic, request.incarnation, request.partition)
                place = (request.offset,) * 3
                marks = log.epoch, log.end, log.end, log.first, log.log_id
                call.reply = wire.FetchReply(*place, *marks, len(self.broker.topics[request.topic][1]))
                self.end(call)

    def due(self, call: PendingRequest) -> float:
        """When it is answered although nothing came."""
        wait_ms: float = getattr(call.request, "wait_ms", 0.0)
        return self.sent_at[call.correlation_id] + wait_ms / 1000


class Script:
    """One consumer on a scripted broker, driven step by step in no time."""

    def __init__(self, broker: Broker, **arguments: Any) -> None:
        self.broker = broker
        self.link = ScriptedLink(broker)
        self.attended = False
        arguments.setdefault("topics", "orders" if "partitions" not in arguments else None)
        self.core = ConsumerCore(consumer_options(**arguments), self.link, wake_driver=self.wake, flush=self.flush)
        self._loop: Any = None

    def wake(self) -> None:
        self.attended = True

    def flush(self) -> None:
        """Requests are out as soon as they are made here."""

    def run(self, operation: Operation[Any]) -> Any:
        """Runs `operation` to its end; time passes only where it waits for it."""
        try:
            for _ in range(STEPS_MAX):
                wait = next(operation)
                if isinstance(wait, CallUserCode):
                    wait.function()
                    continue
                targets, until = (tuple(wait.futures), NEVER if wait.seconds is None else self.link.time + wait.seconds)
                while not any(target.done for target in targets) and self.link.time < until:
                    self._turn(targets, until)
        except StopIteration as end:
            return end.value
        raise AssertionError("it does not end")

    def _turn(self, targets: Any, until: float) -> None:
        self.link.serve()
        self.core.tasks.tick()
        if any(target.done for target in targets):
            return
        due = min(until, self.core.tasks.next_time(), *(self.link.due(call) for call in self.link.open), NEVER)
        if due == NEVER:
            raise AssertionError("it would wait for ever")
        self.link.time = max(due, self.link.time) if due > self.link.time else self.link.time + 0.001

    def pass_time(self, seconds: float) -> None:
        """No caller waits, `seconds` pass."""
        until = self.link.time + seconds
        while self.link.time < until:
            self.link.serve()
            self.core.tasks.tick()
            self.link.time = min(until, self.link.time + 0.05)
        self.link.serve()
        self.core.tasks.tick()

    def poll(self, seconds: float = 1.0, count: int = 500) -> list[bytes | None]:
        return [message.payload for message in self.messages(seconds, count)]

    def messages(self, seconds: float = 1.0, count: int = 500) -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = self.run(self.core.poll(seconds, count))
        return found

    def loop(self) -> Any:
        """As the blocking face's loop."""
        while (messages := self.run(self.core.next_batch())) is not None:
            for message in messages:
                self.core.positions.current = message
                yield message

    def commit(self, message: ReceivedMessage | None = None) -> None:
        self.run(self.core.commit(message))

    def close(self, processed: bool = False) -> None:
        """`processed`: as `with` ends without an error; else as a bare close, or after an error."""
        self.run(self.core.close(processed))
        self.broker.live.clear()


__all__ = ["Broker", "Script", "ScriptedLink", "tag_hash"]
