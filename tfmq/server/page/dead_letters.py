"""Dead letters of a store in a topic: listed, shown, and redriven with the operations of `tfmq dlq`.

A store in a database is not read here, because the server does not know it: `tfmq dlq` reads it where it is.
"""

from __future__ import annotations

from typing import Any, Final

from tfmq.client.operation import Operation
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, Letter, PagePosition, Selection
from tfmq.dead_letters.redrive import RedriveOperation, Report, Wish
from tfmq.dead_letters.topic_store import TopicLetterStore
from tfmq.errors import BadRequest, NotAllowed, UnknownTopic
from tfmq.protocol import commands
from tfmq.server.page.arguments import Arguments, shown_bytes, shown_key, shown_text
from tfmq.server.page.call import Call
from tfmq.server.page.messages import PAYLOAD_BYTES

STORE_BYTES_MAX: Final = 32 << 20
"""Size of a store that is read for a call. The letters are the result of all events in the topic, so each call reads it
completely; of a larger one `tfmq dlq --store topic:NAME` can do that in a process of its own."""
REDRIVEN_MAX: Final = 500
"""Letters that one call redrives, so that it ends in seconds. More need further calls."""
IDS_MAX: Final = 100
FAILURES_SHOWN: Final = 20


def dead_letters(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of the dead letters in the topic `store`, oldest first, and how many there are in each state."""
    arguments = call.arguments
    store = yield from _open(call)
    selection = _selection(arguments)
    after_id = arguments.text("after_id", "")
    after = PagePosition(arguments.number("after_ms", 0), after_id) if after_id else FIRST_PAGE
    limit = arguments.limit()
    counts = yield from store.count_by_state()
    letters = yield from store.find(selection, after, limit + 1)
    shown = letters[:limit]
    return {
        "letters": [_letter_row(each) for each in shown],
        "counts": [[group, state, count] for (group, state), count in sorted(counts.items())],
        "after": [shown[-1].kept_ms, shown[-1].id] if len(letters) > limit else None,
        "now_ms": call.now_ms(),
    }


def dead_letter(call: Call) -> Operation[dict[str, Any]]:
    """Return one dead letter with its payload and all its failures."""
    id = call.arguments.text("id")
    store = yield from _open(call)
    letter = yield from store.get(id)
    if letter is None:
        raise BadRequest(f"There is no dead letter {id!r} in this store.")
    row = _letter_row(letter)
    row["failure_rows"] = [
        {"error": shown_text(each.error), "traceback": shown_text(each.traceback), "at_ms": each.at_ms}
        for each in letter.failures[:FAILURES_SHOWN]
    ]
    if letter.body is not None:
        row["payload"] = shown_bytes(letter.body.payload, PAYLOAD_BYTES)
        row["has_body"] = True
    return {"letter": row}


def redrive(call: Call) -> Operation[dict[str, Any]]:
    """Send dead letters to their topics again, or with `dry` only count them: those of `group`, or with `ids`."""
    arguments = call.arguments
    selection, is_dry = _selection(arguments), arguments.flag("dry")
    to_topic, limit = arguments.text("to_topic", ""), arguments.limit(REDRIVEN_MAX)
    store = yield from _open(call)
    wish = Wish(selection, to_topic or None, limit=limit, dry=is_dry)
    work = RedriveOperation(store, call.link, wish, wall_clock=lambda: call.now_ms() / 1000)
    report: Report = yield from work.run()
    return {
        "dry": is_dry,
        "sent": report.sent,
        "resumed": report.resumed,
        "looping": report.looping,
        "waiting": report.waiting,
        "targets": sorted(report.targets.items()),
        "foreign": sum(report.foreign.values()),
        "problems": [shown_text(each) for each in (*report.unsendable, *report.unsure)][:IDS_MAX],
    }


def _open(call: Call) -> Operation[TopicLetterStore]:
    """Return the store in the topic `store`. Raises UnknownTopic, and NotAllowed for one that is too large."""
    name = call.arguments.text("store")
    found = yield from call.request(commands.Metadata([name]))
    if not found.topics:
        raise UnknownTopic(f"There is no topic {name}: no consumer stored dead letters in it yet.")
    located = yield from call.admin.locate(name, 0, "earliest")
    size = located.end_offset - located.first_offset
    if size > STORE_BYTES_MAX:
        raise NotAllowed(
            f"The topic {name} has {size} bytes, and the page reads stores of up to {STORE_BYTES_MAX} bytes. Use"
            f" tfmq dlq list --store topic:{name}."
        )
    return TopicLetterStore(call.link, name, create=False)


def _selection(arguments: Arguments) -> Selection:
    ids = tuple(arguments.texts("ids", IDS_MAX))
    states = tuple(arguments.texts("states", len(model.STATES)))
    selection = Selection(
        states=states, group=arguments.text("group", "") or None, topic=arguments.text("topic", "") or None, ids=ids
    )
    selection.check()
    return selection


def _letter_row(letter: Letter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "state": str(letter.state),
        "group": letter.group,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "key": shown_key(letter.key),
        "tag": shown_text(letter.tag or ""),
        "calls": letter.calls,
        "redrives": letter.redrives,
        "kept_ms": letter.kept_ms,
        "changed_ms": letter.changed_ms,
        "next_ms": letter.next_ms,
        "payload_bytes": letter.payload_bytes,
        "error": shown_text(letter.error),
        "sent_to": None if letter.journey is None else f"{letter.journey.topic}-{letter.journey.partition}",
        "sent_offset": letter.sent_offset,
    }
