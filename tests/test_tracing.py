"""OpenTelemetry spans of producers, consumers and brokers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import tfmq.aio
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.broker.reply import Session
from tfmq.errors import Busy
from tfmq.hooks import Tracing
from tfmq.message import Message
from tfmq.protocol import commands
from tfmq.server.tracing import RequestTracer, with_spans
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer

SECRET = "secret-4711"


class Recorder:
    """The spans that were ended so far, of a provider of the test's own."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("a program")

    def hook(self) -> Tracing:
        return Tracing(tracer_provider=self.provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        (found,) = (each for each in self.spans if each.name == name)
        return found

    def tree(self) -> set[tuple[str, str]]:
        """(name, name of the parent, or "" where it is none of these spans) of each span."""
        names = {each.context.span_id: each.name for each in self.spans}
        return {(each.name, names.get(each.parent.span_id, "") if each.parent else "") for each in self.spans}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made.provider)  # the global provider, which a broker takes
    yield made
    made.provider.shutdown()


@pytest.fixture
def broker(recorder: Recorder) -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 1}) as broker:
        yield broker


def test_one_message_is_one_trace_from_the_program_over_the_broker_to_its_handler(
    recorder: Recorder, broker: SimulatedBroker
) -> None:
    producer = broker.producer(hooks=[recorder.hook()])
    with recorder.tracer.start_as_current_span("checkout"):
        sent = producer.send("orders", SECRET, key=SECRET, properties={"n": SECRET}).result(5)
    consumer = broker.consumer("orders", group="billing", hooks=[recorder.hook()])
    (message,) = consumer.poll(timeout=0)
    with message.handling(), recorder.tracer.start_as_current_span("charge"):
        pass
    assert recorder.tree() == {
        ("checkout", ""),
        ("send orders", "checkout"),
        ("append orders", "send orders"),
        ("fsync orders", "append orders"),
        ("process orders", "send orders"),
        ("charge", "process orders"),
    }
    assert len({each.context.trace_id for each in recorder.spans}) == 1
    id = f"{sent.message_id:016x}"
    assert dict(recorder.named("send orders").attributes or {}) == {
        "messaging.system": "tfmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": id,
        "messaging.message.body.size": len(SECRET),
        "tfmq.durability": "synced",
        "tfmq.message.offset": 0,
    }
    processed = dict(recorder.named("process orders").attributes or {})
    assert (processed["messaging.operation.type"], processed["messaging.message.id"]) == ("process", id)
    appended = dict(recorder.named("append orders").attributes or {})
    assert (appended["messaging.batch.message_count"], appended["tfmq.durability"]) == (1, "synced")
    kinds = {each.name.split()[0]: each.kind.name for each in recorder.spans}
    assert (kinds["send"], kinds["process"], kinds["append"]) == ("PRODUCER", "CONSUMER", "SERVER")
    assert SECRET not in "".join(each.to_json() for each in recorder.spans), "no key, property or payload"


def test_send_many_is_one_span_whose_context_all_its_messages_carry(
    recorder: Recorder, broker: SimulatedBroker
) -> None:
    producer = broker.producer(hooks=[recorder.hook()])
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert len(producer.send_many("orders", ["a", "b", Message("c", properties={"traceparent": own})])) == 3
    producer.flush()
    span = recorder.named("send orders")
    assert (span.attributes or {})["messaging.batch.message_count"] == 3
    context = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"
    assert [each.properties["traceparent"] for each in broker.sent("orders")] == [context, context, own]
    with pytest.raises(tfmq.TfmqError):
        producer.send_many("orders", ["a", b"x" * (80 << 20)])
    assert [each.status.is_ok for each in recorder.spans if each.name == "send orders"][-1] is False


def test_errors_of_sends_and_handlers_are_recorded_without_their_texts(
    recorder: Recorder, broker: SimulatedBroker
) -> None:
    producer = broker.producer(hooks=[recorder.hook()])
    with pytest.raises(tfmq.MessageTooLarge):
        producer.send("orders", b"x" * (80 << 20))
    send = recorder.named("send orders")
    assert (send.attributes or {})["error.type"] == "message_too_large" and not send.status.is_ok
    recorder.exporter.clear()
    broker.producer().send("orders", "x").result(5)
    consumer = broker.consumer("orders", group="g", hooks=[recorder.hook()], dead_letters=None)
    (message,) = consumer.poll(timeout=0)
    with pytest.raises(KeyError), message.handling():
        raise KeyError(SECRET)
    failed = recorder.named("process orders")
    assert (failed.attributes or {})["error.type"] == "KeyError" and not failed.status.is_ok
    assert [each.name for each in failed.events] == ["exception"] and SECRET not in failed.to_json()


def test_a_handler_that_wants_the_message_later_has_not_failed(recorder: Recorder) -> None:
    hook, message = recorder.hook(), received()
    hook.before_handle(message)
    hook.after_handle(message, tfmq.RetryLater(5))
    span = recorder.named("process orders")
    assert [each.name for each in span.events] == ["retry later"] and span.status.status_code.name == "UNSET"


def test_a_send_that_was_repeated_has_an_event_with_the_number_of_attempts(
    recorder: Recorder, broker: SimulatedBroker
) -> None:
    producer = broker.producer(hooks=[recorder.hook()])
    producer.send("orders", "first").result(5)
    assert not recorder.named("send orders").events
    recorder.exporter.clear()
    broker.fail_next("send", Busy)
    producer.send("orders", "second").result(5)
    (event,) = recorder.named("send orders").events
    assert event.name == "retry" and (event.attributes or {})["tfmq.send.attempts"] == 2


def test_the_steps_of_a_transaction_are_spans_below_the_active_one(recorder: Recorder, broker: SimulatedBroker) -> None:
    producer = broker.producer(hooks=[recorder.hook()])
    with recorder.tracer.start_as_current_span("checkout"):
        with producer.transaction() as local:
            local.send("orders", "a")
        transaction = producer.begin("order-17")
        transaction.send("orders", "b")
        transaction.prepare()
        transaction.commit()
    names = {"transact transaction", "prepare transaction", "commit transaction"}
    assert {(name, "checkout") for name in names} <= recorder.tree()
    assert (recorder.named("commit transaction").attributes or {})["tfmq.transaction.xid"] == "order-17"
    assert {each.status.status_code.name for each in recorder.spans} == {"UNSET"}


def test_a_fetch_within_a_span_is_a_span_of_the_broker_below_it(recorder: Recorder, broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result(5)
    consumer = broker.consumer("orders", hooks=[recorder.hook()], start="earliest")
    with recorder.tracer.start_as_current_span("poll"):
        assert consumer.poll(timeout=1)
    broker.clock.advance(60)
    consumer.close()
    assert ("fetch orders", "poll") in recorder.tree()


def requests_of(broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that the broker gets from now on."""
    engine = broker._server.engine
    assert engine is not None
    found: list[Any] = []
    handle = type(engine).handle
    monkeypatch.setattr(type(engine), "handle", lambda self, *asked: (found.append(asked[0]), handle(self, *asked))[1])
    return found


def test_a_context_is_sent_to_the_broker_only_from_a_sampled_active_span_of_a_client_that_traces(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    silent = TracerProvider(sampler=ALWAYS_OFF)
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "x").result(5)
        requests = requests_of(broker, monkeypatch)
        with recorder.tracer.start_as_current_span("active"):
            broker.producer().send("orders", "x", properties={"traceparent": parent}).result(5)
        broker.producer(hooks=[Tracing(tracer_provider=silent)]).send("orders", "x").result(5)
        consumer = broker.consumer("orders", group="g", hooks=[recorder.hook()])
        assert consumer.poll(timeout=0)
        assert requests and {getattr(each, "trace", None) for each in requests} == {None}


def test_unsampled_spans_are_propagated_and_not_recorded(recorder: Recorder) -> None:
    hook = Tracing(tracer_provider=TracerProvider(sampler=ALWAYS_OFF))
    sent = hook.before_send("orders", Message(b"x"))
    assert int((sent.properties or {})["traceparent"][-2:], 16) & 1 == 0
    hook.after_send("orders", sent, None, None)
    assert not recorder.spans and not hook._sending


def test_a_trace_context_that_the_program_has_set_is_kept(recorder: Recorder) -> None:
    mine = Message(b"x", properties={"traceparent": "mine"})
    assert recorder.hook().before_send("orders", mine) is mine
    assert not recorder.spans


def test_without_a_provider_the_span_of_the_program_is_propagated(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Tracing(tracer_provider=trace.NoOpTracerProvider())
    message = Message(b"x")
    assert hook.before_send("orders", message) is message
    sender = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(sender)):
        sent = hook.before_send("orders", Message(b"x", properties={"n": "1"}))
    assert sent.properties == {"n": "1", "traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"}
    hook.before_handle(received(sent.properties))
    active = trace.get_current_span().get_span_context()
    hook.after_handle(received(sent.properties), None)
    assert (active.trace_id, active.span_id) == (0xABC, 0xDEF)
    assert not trace.get_current_span().get_span_context().is_valid


def test_handlers_that_are_nested_end_in_order(recorder: Recorder) -> None:
    hook = recorder.hook()
    outer, inner = received(), received()
    with recorder.tracer.start_as_current_span("program") as program:
        hook.before_handle(outer)
        first = trace.get_current_span()
        hook.before_handle(inner)
        hook.after_handle(inner, None)
        assert trace.get_current_span() is first
        hook.after_handle(outer, None)
        assert trace.get_current_span() is program
    links = [link.context.span_id for link in recorder.spans[-2].links]
    assert links == [program.get_span_context().span_id], "the span that called the handler is linked"


@pytest.mark.parametrize("kind", ["function", "coroutine function"])
def test_two_handlers_at_the_same_time_do_not_take_each_other_s_span(
    recorder: Recorder, kind: str, tmp_path: Path
) -> None:
    seen: dict[str, int] = {}

    async def scenario(bench: Bench) -> None:
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=None, hooks=[recorder.hook()]
        )
        both, together = asyncio.Event(), threading.Barrier(2, timeout=60)

        def trace_id() -> int:
            return trace.get_current_span().get_span_context().trace_id

        async def awaited(message: Any) -> None:
            seen[message.text] = trace_id()
            if len(seen) == 2:
                both.set()
                consumer.stop()
            await both.wait()
            assert trace_id() == seen[message.text]

        def plain(message: Any) -> None:
            together.wait()
            seen[message.text] = trace_id()
            together.wait()
            consumer.stop()
            assert trace_id() == seen[message.text]

        await consumer.run(plain if kind == "function" else awaited, workers=2, order="none", signals=False)

    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        for number, text in enumerate(("a", "b"), 1):
            bench.send(text, properties={"traceparent": f"00-{number:032x}-{number:016x}-01"})
        asyncio.run(scenario(bench))
    assert seen == {"a": 1, "b": 2}


class Answer:
    """A reply that remembers how it was given."""

    correlation = 1

    def __init__(self) -> None:
        self.given: Any = None

    def body_done(self) -> None: ...

    def appended(self) -> None: ...

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self.given = fields

    def error(self, error: BaseException) -> None:
        self.given = error


def test_an_error_of_the_broker_is_in_its_span_and_a_wrong_context_is_no_error(recorder: Recorder) -> None:
    handler = RequestTracer(trace, lambda request, body, reply, session: reply.error(Busy()))
    request, answer = commands.Fetch("orders", 0, 0, 0, trace="00-zz"), Answer()
    session: Session = None  # type: ignore[assignment]
    handler.handle(request, b"", answer, session)
    assert isinstance(answer.given, Busy)
    span = recorder.named("fetch orders")
    assert span.parent is None and (span.attributes or {})["error.type"] == "busy" and not span.status.is_ok


def test_a_broker_without_opentelemetry_calls_the_handler_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    handle = lambda *asked: None  # noqa: E731
    assert with_spans(handle) is handle


NOTHING_IMPORTED = """
import sys
import tfmq, tfmq.aio, tfmq.twisted, tfmq.server.main, tfmq.cli.main
from tfmq.testing.broker import SimulatedBroker
with SimulatedBroker() as broker:
    broker.producer().send("orders", "x", properties={"traceparent": "00-1"}).result(5)
    assert broker.consumer("orders", group="g").poll(timeout=0)
found = [name for name in sys.modules if name.startswith("opentelemetry")]
assert not found, found
"""


def test_nothing_of_opentelemetry_is_imported_without_the_hook() -> None:
    subprocess.run([sys.executable, "-c", NOTHING_IMPORTED], check=True, timeout=60)


TRACED_SERVER = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(
    out=open({path!r}, "a", buffering=1), formatter=lambda span: span.to_json(indent=None) + "\\n")))
trace.set_tracer_provider(provider)
from tfmq.server.main import main
sys.exit(main())
"""


def test_the_spans_of_a_server_process_are_children_of_those_of_its_clients(recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    server = LiveServer(tmp_path / "data")
    server.program = (sys.executable, "-c", TRACED_SERVER.format(path=str(path)))
    server.start()
    try:
        with tfmq.Producer(server.address, hooks=[recorder.hook()]) as producer:
            producer.send("orders", "x").result(30)
    finally:
        server.stop()
    send = recorder.named("send orders")
    rows = {each["name"]: each for each in map(json.loads, path.read_text().splitlines())}
    assert rows.keys() == {"append orders", "fsync orders"}
    appended = rows["append orders"]
    assert appended["parent_id"] == f"0x{send.context.span_id:016x}"
    assert appended["context"]["trace_id"] == f"0x{send.context.trace_id:032x}"
    assert rows["fsync orders"]["parent_id"] == appended["context"]["span_id"]


def received(properties: Any = None) -> Any:
    """A received message of the topic orders."""
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "x", properties=properties).result(5)
        return broker.sent("orders")[0]
