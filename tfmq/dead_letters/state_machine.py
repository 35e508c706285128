"""State machine of dead letters: what each event changes. No I/O.

All stores use `apply_event`, so the same events lead to the same letter in each store. An event that the letter's state
does not accept, or that has the token of another lease or redrive, changes nothing: `apply_event` returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from tfmq.client.worker.dead_letter_store import Failure
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, DROPPED, FAILING, HANDLED, REDRIVEN, REDRIVING, RETRYING, WAITING, Letter

PUT_OFFS_MAX: Final = 1000
"""After this many postponements a letter is dead. With one postponement every 30 s, that is a working day."""

CRASHED_DURING_CALL: Final = "the process ended while it was being handled, the last time"

_NEW_ROUND: Final[Mapping[type[Any], tuple[str, ...]]] = {
    model.KeepEvent: (WAITING, DEAD),
    model.BeginEvent: (FAILING, DEAD),
    model.NoteEvent: (FAILING, DEAD),
}
"""Event of a round of handler calls -> possible next states, if the letter is missing, failing or final."""

TRANSITIONS: Final[Mapping[str, Mapping[type[Any], tuple[str, ...]]]] = {
    "": _NEW_ROUND,
    FAILING: {**_NEW_ROUND, model.PassEvent: (HANDLED,), model.DropEvent: (DROPPED,), model.AdoptEvent: (FAILING,)},
    WAITING: {
        model.KeepEvent: (WAITING, DEAD),
        model.BeginEvent: (WAITING,),
        model.NoteEvent: (WAITING,),
        model.TakeEvent: (RETRYING, DEAD),
        model.RetryEvent: (WAITING,),
        model.DropEvent: (DROPPED,),
        model.ClaimEvent: (REDRIVING,),
        model.AdoptEvent: (WAITING,),
    },
    RETRYING: {
        model.KeepEvent: (RETRYING, DEAD),
        model.BeginEvent: (RETRYING,),
        model.NoteEvent: (RETRYING,),
        model.TakeEvent: (RETRYING, DEAD),
        model.RenewEvent: (RETRYING,),
        model.HandledEvent: (HANDLED,),
        model.FailedEvent: (WAITING, DEAD),
        model.PutOffEvent: (WAITING, DEAD),
        model.GiveBackEvent: (WAITING,),
        model.AdoptEvent: (RETRYING,),
    },
    DEAD: {
        model.KeepEvent: (DEAD,),
        model.BeginEvent: (DEAD,),
        model.NoteEvent: (DEAD,),
        model.RetryEvent: (WAITING,),
        model.DropEvent: (DROPPED,),
        model.ClaimEvent: (REDRIVING,),
        model.AdoptEvent: (DEAD,),
    },
    REDRIVING: {
        model.KeepEvent: (REDRIVING,),
        model.BeginEvent: (REDRIVING,),
        model.NoteEvent: (REDRIVING,),
        model.ClaimEvent: (REDRIVING,),
        model.DepartEvent: (REDRIVING,),
        model.ArriveEvent: (REDRIVEN,),
        model.ReturnEvent: (DEAD,),
        model.DropEvent: (DROPPED,),
        model.AdoptEvent: (REDRIVING,),
    },
    REDRIVEN: {**_NEW_ROUND, model.AdoptEvent: (REDRIVEN,)},
    HANDLED: {**_NEW_ROUND, model.AdoptEvent: (HANDLED,)},
    DROPPED: {**_NEW_ROUND, model.RetryEvent: (WAITING,), model.AdoptEvent: (DROPPED,)},
}
"""State -> event -> possible next states. State "": no letter is stored. In each state, other events have no effect.

A `KeepEvent` that was applied before changes nothing, in any state.
"""


_EVENTS_OF_HOLDER: Final = (
    model.RenewEvent,
    model.HandledEvent,
    model.FailedEvent,
    model.PutOffEvent,
    model.GiveBackEvent,
    model.DepartEvent,
    model.ReturnEvent,
)
"""Events without effect if another lease or redrive has the letter by now."""


def apply_event(letter: Letter | None, event: model.Event) -> Letter | None:
    """Return the letter after `event`, or None if the event has no effect."""
    state = letter.state if letter is not None else ""
    allowed = TRANSITIONS[state].get(type(event))
    if allowed is None:
        return None
    if isinstance(event, _EVENTS_OF_HOLDER) and letter is not None and letter.token != event.token:
        return None
    found: Letter | None = _HANDLERS[type(event)](letter, event)
    if found is None:
        return None
    assert found is letter or found.state in allowed, f"{state} -> {found.state} after {type(event).__name__}"
    return found if found is letter else replace(found, changed_ms=event.at_ms)


def _apply_keep(letter: Letter | None, event: model.KeepEvent) -> Letter:
    """Store a message; if a letter of the message is stored already, add the new failures and calls to that letter.

    After a crash, a message whose offset was not committed is delivered again. The repeated delivery does not start a
    new round of calls: the letter keeps its number of calls left, and a dead letter stays dead. If the response to an
    event was lost, the store applies the event a second time; this changes nothing.
    """
    if letter is None:
        return replace(_to_waiting_or_dead(event.letter, event), kept_ms=event.at_ms)
    if _is_repeated(letter, event.letter):
        return letter
    joined = letter.with_failures([each for each in event.letter.failures if each not in letter.failures])
    joined = _with_broker(replace(joined, body=event.letter.body or letter.body), event.letter)
    if letter.state == REDRIVING:
        return joined
    joined = replace(joined, calls=letter.calls + event.letter.calls)
    taken = letter.state == RETRYING and event.next_ms > 0  # The consumer with the lease decides the next state.
    if letter.state == DEAD or taken:
        return joined
    if letter.state not in model.FINAL_STATES:
        put_off = event.begun and letter.state == FAILING
        left = letter.calls_left + (1 if put_off else 0)  # A postponed call uses up no call.
        event = event._replace(letter=replace(event.letter, calls_left=max(1, left)))
    return _to_waiting_or_dead(joined, event)


def _with_broker(letter: Letter, met: Letter) -> Letter:
    """If `letter` names no broker, return it with the broker of `met`, a new letter of the same message."""
    return letter if letter.broker or not met.broker else replace(letter, broker=met.broker)


def _is_repeated(letter: Letter, repeated: Letter) -> bool:
    """Return whether `letter` has the latest failure of `repeated`. If so, the same event was applied before."""
    failures = {(each.at_ms, each.error) for each in letter.failures}
    return bool(repeated.failures) and repeated.failures[-1][:2] in failures


def _to_waiting_or_dead(letter: Letter, event: model.KeepEvent) -> Letter:
    waits = event.next_ms > 0 and event.letter.calls_left > 0
    return replace(
        letter,
        state=WAITING if waits else DEAD,
        calls_left=event.letter.calls_left if waits else 0,
        next_ms=event.next_ms if waits else 0,
        put_offs=1 if waits else 0,
        token="",
        lease_ms=0,
        journey=None,
        sent_offset=-1,
    )


def _apply_begin(letter: Letter | None, event: model.BeginEvent) -> Letter:
    """Count a handler call before the call starts; if no calls are left, the letter becomes dead.

    A letter that is waiting, leased, dead or being redriven is unchanged, since the consumer then makes no call.
    """
    if letter is not None and letter.state not in (FAILING, *model.FINAL_STATES):
        return letter
    left = letter.calls_left if letter is not None and letter.state == FAILING else event.letter.calls_left
    if letter is not None and left <= 0:
        return _to_dead(letter, Failure(event.at_ms, CRASHED_DURING_CALL))
    found = replace(event.letter, kept_ms=event.at_ms) if letter is None else _with_broker(letter, event.letter)
    return _with_call_state(replace(found, calls=found.calls + 1), max(0, left - 1), FAILING)


def _apply_note(letter: Letter | None, event: model.NoteEvent) -> Letter:
    """Record a failed call of a message whose offset is not committed yet.

    If a round of calls is in progress (state "failing"), the call belongs to it, even after a crash of the consumer;
    otherwise the call starts a new round. A letter that is waiting, leased, dead or being redriven keeps its state: its
    message was only delivered again.
    """
    count = 0 if event.begun else 1
    if letter is None:
        found, left = replace(event.letter, kept_ms=event.at_ms), event.letter.calls_left - 1
    else:
        found = _with_broker(letter.with_failures(event.letter.failures), event.letter)
        if letter.state not in (FAILING, *model.FINAL_STATES):
            return replace(found, calls=letter.calls + count)
        left = letter.calls_left - count if letter.state == FAILING else event.letter.calls_left - 1
    found = replace(found, calls=found.calls + count)
    return _with_call_state(found, max(0, left), FAILING if left > 0 else DEAD)


def _with_call_state(letter: Letter, left: int, state: str) -> Letter:
    return replace(letter, state=state, calls_left=left, next_ms=0, put_offs=0, journey=None, sent_offset=-1)


def _apply_take(letter: Letter, event: model.TakeEvent) -> Letter | None:
    """Lease the letter if its due time has come, or if another consumer's lease of it has expired.

    The handler call counts from now on, because it may crash the process. If no calls are left, the letter is dead.
    """
    if letter.state == RETRYING and letter.lease_ms > event.at_ms:
        return None
    if letter.state == WAITING and letter.next_ms > event.at_ms:
        return None
    if letter.calls_left <= 0:
        return _to_dead(letter, Failure(event.at_ms, CRASHED_DURING_CALL))
    return replace(
        letter,
        state=RETRYING,
        calls=letter.calls + 1,
        calls_left=letter.calls_left - 1,
        token=event.token,
        lease_ms=event.lease_ms,
    )


def _to_dead(letter: Letter, *failures: Failure) -> Letter:
    return _end_lease(letter.with_failures(failures), DEAD)


def _end_lease(letter: Letter, state: str, next_ms: int = 0) -> Letter:
    return replace(letter, state=state, next_ms=next_ms, token="", lease_ms=0)


def _apply_failed(letter: Letter, event: model.FailedEvent) -> Letter:
    if letter.calls_left <= 0 or not event.next_ms:
        return _to_dead(letter, event.failure)
    return _end_lease(letter.with_failures([event.failure]), WAITING, event.next_ms)


def _apply_put_off(letter: Letter, event: model.PutOffEvent) -> Letter:
    """Make the leased letter waiting, or dead after PUT_OFFS_MAX postponements. A postponement uses up no call."""
    if letter.put_offs >= PUT_OFFS_MAX:
        return _to_dead(letter, event.failure._replace(error=f"put off {letter.put_offs} times: {event.failure.error}"))
    found = replace(letter, put_offs=letter.put_offs + 1, calls_left=letter.calls_left + 1)
    return _end_lease(found.with_failures([event.failure]), WAITING, event.next_ms)


def _apply_give_back(letter: Letter, event: model.GiveBackEvent) -> Letter:
    found = replace(letter, calls=letter.calls - 1, calls_left=letter.calls_left + 1)
    return _end_lease(found, WAITING, letter.next_ms)


def _apply_retry(letter: Letter, event: model.RetryEvent) -> Letter:
    found = replace(letter, calls_left=max(1, event.calls_left), put_offs=0, journey=None)
    return _end_lease(found, WAITING, event.at_ms)


def _apply_drop(letter: Letter, event: model.DropEvent) -> Letter | None:
    """Drop the letter. Without `force`, a letter that a redrive may have sent is unchanged."""
    if letter.state == REDRIVING and letter.journey is not None and not event.force:
        return None
    return _end_lease(letter, DROPPED)


def _apply_adopt(letter: Letter, event: model.AdoptEvent) -> Letter | None:
    return replace(letter, broker=event.broker) if event.force or not letter.broker else None


def _apply_claim(letter: Letter, event: model.ClaimEvent) -> Letter | None:
    """Reserve the letter for a redrive. A waiting letter is reserved only if `event.waiting` is set.

    If another redrive reserved the letter but recorded no sequence, it was never sent and can be reserved again.
    """
    if letter.state == WAITING and not event.waiting:
        return None
    if letter.state == REDRIVING and letter.journey is not None:
        return None
    return replace(letter, state=REDRIVING, token=event.token, next_ms=0, lease_ms=0, journey=None, sent_offset=-1)


def _apply_depart(letter: Letter, event: model.DepartEvent) -> Letter | None:
    """Record the producer sequence unless one is recorded, so that the letter cannot be sent with two sequences."""
    return replace(letter, journey=event.journey) if letter.journey is None else None


def _apply_arrive(letter: Letter, event: model.ArriveEvent) -> Letter | None:
    """Make the letter redriven, if the event has the producer sequence that is recorded in the letter."""
    journey = letter.journey
    if journey is None or (journey.producer_id, journey.sequence) != (event.producer_id, event.sequence):
        return None
    return replace(letter, state=REDRIVEN, token="", sent_offset=event.offset)


def _apply_return(letter: Letter, event: model.ReturnEvent) -> Letter | None:
    """Make the letter dead again; None if the letter has another sequence: another redrive may be sending it."""
    sequence = (0, 0) if letter.journey is None else (letter.journey.producer_id, letter.journey.sequence)
    if sequence != (event.producer_id, event.sequence):
        return None
    return replace(letter, state=DEAD, token="", journey=None)


_HANDLERS: Final[Mapping[type[Any], Callable[[Any, Any], Letter | None]]] = {
    model.KeepEvent: _apply_keep,
    model.BeginEvent: _apply_begin,
    model.NoteEvent: _apply_note,
    model.PassEvent: lambda letter, event: replace(letter, state=HANDLED),
    model.TakeEvent: _apply_take,
    model.RenewEvent: lambda letter, event: replace(letter, lease_ms=event.lease_ms),
    model.HandledEvent: lambda letter, event: _end_lease(letter, HANDLED),
    model.FailedEvent: _apply_failed,
    model.PutOffEvent: _apply_put_off,
    model.GiveBackEvent: _apply_give_back,
    model.RetryEvent: _apply_retry,
    model.DropEvent: _apply_drop,
    model.AdoptEvent: _apply_adopt,
    model.ClaimEvent: _apply_claim,
    model.DepartEvent: _apply_depart,
    model.ArriveEvent: _apply_arrive,
    model.ReturnEvent: _apply_return,
}
assert set(TRANSITIONS) == {"", *model.STATES}
