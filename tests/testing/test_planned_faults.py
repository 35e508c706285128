"""Requests that fail because a test says so."""

from typing import Any

import pytest

from tfmq.errors import BadRequest, DiskFull, TimedOut, UnknownTopic
from tfmq.protocol import commands
from tfmq.testing.planned_faults import REQUESTS_BY_WORD, ErrorReplacingReply, PlannedFaults, request_types


class Reply:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.silent = False

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self.said.append(fields)

    def error(self, error: BaseException) -> None:
        self.said.append(error)


def serve(faults: PlannedFaults, request: Any) -> tuple[Reply, list[Any]]:
    """One request through the handlers, whose own methods only note that they were called."""
    reply, served = Reply(), []

    class Engine:
        def handle(self, request: Any, body: Any, reply: Any, session: Any) -> None:
            served.append(request)
            reply.ok("done")

    engine: Any = Engine()
    faults.serve(engine, request, b"", reply, None)
    return reply, served


def test_without_a_plan_requests_are_served() -> None:
    reply, served = serve(PlannedFaults(), commands.Ping())
    assert (reply.said, served) == ([("done",)], [commands.Ping()])


def test_the_next_one_of_its_kind_fails_and_is_not_done() -> None:
    faults = PlannedFaults()
    faults.fail_next("create_topic", DiskFull)
    assert serve(faults, commands.Ping())[1], "another kind is none of its business"
    reply, served = serve(faults, commands.CreateTopic("x", 1, {}))
    assert isinstance(reply.said[0], DiskFull) and served == []
    assert serve(faults, commands.CreateTopic("x", 1, {}))[1]


def test_several_fail_in_the_order_in_which_they_were_planned() -> None:
    faults = PlannedFaults()
    faults.fail_next("ping", TimedOut, times=2)
    faults.fail_next("ping", UnknownTopic("there is no such thing"))
    said = [serve(faults, commands.Ping())[0].said[0] for _ in range(4)]
    assert [type(each) for each in said] == [TimedOut, TimedOut, UnknownTopic, tuple]
    assert "no such thing" in str(said[2])


def test_a_lost_answer_is_one_to_something_that_was_done() -> None:
    faults = PlannedFaults()
    faults.fail_next("ping", TimedOut, done=True)
    reply, served = serve(faults, commands.Ping())
    assert served and [type(each) for each in reply.said] == [TimedOut]


def test_a_real_error_is_not_hidden_by_a_lost_answer() -> None:
    reply = Reply()
    lost = ErrorReplacingReply(reply, TimedOut())
    lost.error(DiskFull())
    assert isinstance(reply.said[0], DiskFull)
    assert lost.silent is False


def test_every_word_and_every_command_can_be_named() -> None:
    for word in REQUESTS_BY_WORD:
        assert request_types(word)
    for command in commands.COMMANDS:
        if command.request.shape is not commands.Hello:
            assert request_types(command.name.lower())
    assert request_types("send") == (commands.Produce, commands.Transact)


def test_other_words_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match=r"'sned' cannot be made to fail.*send, fetch, join.*connect.*create_topic"):
        PlannedFaults().fail_next("sned", TimedOut)
    with pytest.raises(TypeError, match="errors of tfmq, not OSError"):
        PlannedFaults().fail_next("send", OSError())  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [0, -1, True, "2"])
def test_a_fault_comes_once_or_more_often(times: Any) -> None:
    for what in ("send", "connect"):
        with pytest.raises(BadRequest, match="once or more often"):
            PlannedFaults().fail_next(what, TimedOut, times=times)


def test_connections_are_refused_as_often_as_was_said() -> None:
    faults = PlannedFaults()
    faults.fail_next("connect", TimedOut, times=2)
    assert [faults.take_refusal() for _ in range(4)] == [True, True, False, False]
