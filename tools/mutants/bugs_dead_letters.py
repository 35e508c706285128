"""Planted bugs: dead letters: lost, handled too often, sent twice, or not durable."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

COURSE: Final = "tests/dead_letters/test_state_machine.py"
SHELF: Final = "tests/dead_letters/test_store.py"
STORE: Final = "tests/dead_letters/test_sql_store.py"
DATABASE: Final = "tests/dead_letters/test_sql_store.py"
KEEPING: Final = "tests/dead_letters/test_store.py"
RETRYING: Final = "tests/dead_letters/test_retry_loop.py"
REDRIVE: Final = "tests/dead_letters/test_redrive.py"
DEPARTURE: Final = "tests/dead_letters/test_redrive_run.py"
TOPIC: Final = "tests/dead_letters/test_topic_store.py"
NUMBERED: Final = "tests/client/send/test_idempotent_send.py"

_COURSE = "tfmq/dead_letters/state_machine.py"
_REDRIVE = "tfmq/dead_letters/redrive.py"
_DEPARTURE = "tfmq/dead_letters/redrive.py"
_TOPIC = "tfmq/dead_letters/topic_store.py"

STATES: Final = (
    Mutant(
        "call-counted-after-the-handler",
        "a message that kills its process each time is called a limited number of times",
        _COURSE,
        "        calls_left=letter.calls_left - 1,\n        token=event.token,",
        "        calls_left=letter.calls_left,\n        token=event.token,",
        [COURSE],
    ),
    Mutant(
        "lease-of-another-taken",
        "while a lease is valid, no other consumer handles the message",
        _COURSE,
        "    if letter.state == RETRYING and letter.lease_ms > event.at_ms:\n        return None\n",
        "",
        [COURSE],
    ),
    Mutant(
        "zombie-says-handled",
        "a consumer that lost a dead letter does not change it",
        _COURSE,
        "    model.HandledEvent,\n    model.FailedEvent,\n",
        "    model.FailedEvent,\n",
        [COURSE],
    ),
    Mutant(
        "put-off-without-end",
        "a message cannot be put off without limit",
        _COURSE,
        "    if letter.put_offs >= PUT_OFFS_MAX:\n",
        "    if letter.put_offs < 0:\n",
        [f"{COURSE}::test_putting_off_costs_no_call_and_comes_to_an_end"],
    ),
    Mutant(
        "place-settled-anew",
        "a dead letter that may have been sent under one sequence is never sent under another",
        _COURSE,
        "    return replace(letter, journey=event.journey) if letter.journey is None else None\n",
        "    return replace(letter, journey=event.journey)\n",
        [COURSE],
    ),
    Mutant(
        "kept-again-while-under-way",
        "a dead letter that is being redriven stays so when its message is stored again",
        _COURSE,
        "    if letter.state == REDRIVING:\n        return joined\n",
        "",
        [COURSE],
    ),
    Mutant(
        "due-message-lost-when-its-lease-is-over",
        "messages of a killed consumer are handled by another one",
        "tfmq/dead_letters/sql_store.py",
        "            for state, due in ((model.RETRYING, COLUMNS.lease_ms), (model.WAITING, COLUMNS.next_ms)):\n",
        "            for state, due in ((model.WAITING, COLUMNS.next_ms),):\n",
        [SHELF, KEEPING],
    ),
    Mutant(
        "lease-not-renewed",
        "a handler that runs for minutes keeps its message",
        "tfmq/dead_letters/retry_loop.py",
        ("                    if self._now() >= renew_at:\n                        yield from self._renew_lease()\n"),
        "                    if self._now() >= renew_at:\n",
        [RETRYING],
    ),
    Mutant(
        "outcome-said-once",
        "a handled message is not handled again because the store was full for a moment",
        "tfmq/dead_letters/retry_loop.py",
        "                if self.stop_asked.done:\n                    raise\n",
        "                raise\n",
        [RETRYING],
    ),
)

STORES: Final = (
    Mutant(
        "sqlite-does-not-wait-for-the-disk",
        "a committed change is durable",
        "tfmq/dead_letters/sql_store.py",
        '"PRAGMA synchronous=FULL"',
        '"PRAGMA synchronous=NORMAL"',
        [DATABASE],
    ),
    Mutant(
        "postgresql-commits-early",
        "a committed change is durable, whatever the server's default is",
        "tfmq/dead_letters/sql_store.py",
        '                event.listen(engine, "connect", _set_synchronous_commit)\n',
        "                pass\n",
        [DATABASE],
    ),
    Mutant(
        "folder-not-fsynced",
        "the folder of a new store survives a power cut",
        "tfmq/dead_letters/sql_store.py",
        "        (disk or RealDisk()).force_folder(str(each.parent))\n",
        "",
        [DATABASE],
    ),
    Mutant(
        "rows-read-without-their-locks",
        "of several consumers that take the same dead letter exactly one has it",
        "tfmq/dead_letters/sql_store.py",
        (
            "        query = (\n"
            "            select(*COLUMNS_WITHOUT_BODY).where(COLUMNS.id.in_(sorted(set(ids)))).order_by(COLUM"
            "NS.id).with_for_update()\n"
            "        )\n"
        ),
        (
            "        query = select(*COLUMNS_WITHOUT_BODY).where(COLUMNS.id.in_(sorted(set(ids)))).order_by(C"
            "OLUMNS.id)\n"
        ),
        [f"{STORE}::test_of_many_who_claim_the_same_one_has_it"],
        scale=1.0,
    ),
    Mutant(
        "event-believed-before-it-came-by",
        "of two consumers that take the same dead letter, the first in the topic's log has it",
        _TOPIC,
        "        found = yield from self._read_new_events(until, numbers)\n",
        (
            "        found = {number: apply_event(self._index.letters.get(step[0]), step[1]) for number,"
            " step in zip(numbers, wanted, strict=True)}\n"
        ),
        [SHELF, REDRIVE, TOPIC],
    ),
    Mutant(
        "id-kept-after-an-unknown-outcome",
        "after a send with an unknown outcome later events are still sent",
        _TOPIC,
        "            if not sent and self._producer is not None:\n",
        "            if sent and self._producer is None:\n",
        [TOPIC],
    ),
    Mutant(
        "another-brokers-message-taken-for-the-same",
        "messages of two brokers are two dead letters",
        "tfmq/dead_letters/model.py",
        '{group}/{incarnation}/{partition}/{offset}/{appended_ms}"',
        '{group}/{incarnation}/{partition}/{offset}"',
        ["tests/dead_letters/test_model.py"],
    ),
)

SENDING: Final = (
    Mutant(
        "what-is-under-way-left-there",
        "a redrive continues what another one began",
        _REDRIVE,
        ("        if not self._request.dry:\n            yield from self._resume()\n"),
        "",
        [REDRIVE],
    ),
    Mutant(
        "sent-under-a-new-place",
        "an interrupted redrive is repeated under the recorded sequences",
        _REDRIVE,
        (
            "            for run in group_runs([each for each in letters if each.journey is not None]):\n"
            "                self.report.resumed += (yield from self._resume_run(run)).arrived\n"
        ),
        (
            "            for run in group_runs([each for each in letters if each.journey is not None]):\n"
            "                fresh = yield from idempotent_send.lease_producer_id(self._link, self._deadline())\n"
            "                run = [replace(e, journey=e.journey._replace(producer_id=fresh,"
            " sequence=n)) for n, e in enumerate(run)]\n"
            "                self.report.resumed += (yield from self._resume_run(run)).arrived\n"
        ),
        [REDRIVE],
    ),
    Mutant(
        "refused-places-ignored",
        "a dead letter that another redrive took over is not sent",
        _REDRIVE,
        "            if now is not None\n",
        "",
        [REDRIVE],
    ),
    Mutant(
        "hole-given-back",
        "a sequence is given back only when no redrive can still send under it",
        _REDRIVE,
        "                found, (yield from close_run(self._link, found, self._deadline(), self._now_ms))\n",
        (
            "                found, RedriveResult(tuple((e.id, model.ReturnEvent(self._now_ms(),"
            " e.token, e.journey.producer_id, e.journey.sequence)) for e in found))\n"
        ),
        [REDRIVE],
    ),
    Mutant(
        "returned-from-any-place",
        "a slow redrive gives back nothing that is being sent under another sequence",
        _COURSE,
        "    if sequence != (event.producer_id, event.sequence):\n        return None\n",
        "",
        [COURSE],
    ),
    Mutant(
        "gap-believed",
        "a returned dead letter can be sent by no other redrive, also by one that was suspended",
        _DEPARTURE,
        "    except (SequenceGap, StaleProducer, UnknownProducer):\n"
        "        return (yield from close_run(link, letters, until, now_ms))\n",
        (
            "    except SequenceGap:\n"
            "        return _run_result(letters, {}, now_ms())\n"
            "    except (StaleProducer, UnknownProducer):\n"
            "        return (yield from close_run(link, letters, until, now_ms))\n"
        ),
        [DEPARTURE],
    ),
    Mutant(
        "forgotten-id-believed-unused",
        "what a broker has forgotten is looked up in the log",
        _DEPARTURE,
        "            sequences = [each.sequence for each in journeys]\n"
        "            found = yield from idempotent_send.find_records(link, stream, sequences, since, until)\n",
        "            found = {} if since >= 0 else dict((yield from ()))\n",
        [DEPARTURE, REDRIVE],
    ),
    Mutant(
        "closed-stream-not-asked",
        "the stored messages of a closed producer id are known",
        _DEPARTURE,
        "each.sequence: -1 for each in journeys if each.sequence <= last",
        "each.sequence: -1 for each in journeys if each.sequence < last",
        [DEPARTURE],
    ),
    Mutant(
        "what-fails-again-sent-again",
        "one redrive sends no message twice, however fast it fails again",
        _REDRIVE,
        "        chosen = self._request.selection._replace(states=states, until_ms=until_ms)\n",
        "        chosen = self._request.selection._replace(states=states)\n",
        [REDRIVE],
    ),
    Mutant(
        "redrives-not-counted",
        "a message that fails repeatedly is skipped",
        _DEPARTURE,
        "attribute.redrives + 1)",
        "attribute.redrives)",
        [REDRIVE, DEPARTURE],
    ),
    Mutant(
        "rate-forgotten",
        "the rate limit is kept",
        _REDRIVE,
        "                yield from self._wait_for_rate(len(batch))\n",
        "",
        [REDRIVE],
    ),
    Mutant(
        "numbered-send-not-fsynced",
        "a numbered send is durable when it returns",
        "tfmq/client/send/idempotent_send.py",
        "    request = commands.Produce(*fields, commands.ACKS_SYNCED, encoded.blocks)",
        "    request = commands.Produce(*fields, 1, encoded.blocks)",
        [NUMBERED, REDRIVE],
    ),
)

DEAD_LETTERS: Final = STATES + STORES + SENDING
