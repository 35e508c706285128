"""Every command of the protocol's table has its method."""

from tfmq.protocol.commands import COMMANDS
from tfmq.server.session import HANDLERS, HELLO, METHODS, unknown_command


def test_every_command_but_hello_is_served_by_the_method_of_its_name() -> None:
    assert {command.code for command in COMMANDS} - {HELLO.code} == set(HANDLERS)
    for command, method in HANDLERS.values():
        assert method.__name__ == command.name.lower()
    assert len(HANDLERS) == len(METHODS)


def test_a_code_of_a_later_release_is_told_from_one_that_nobody_knows() -> None:
    assert unknown_command(79).code == "not_supported"
    assert "more commands about schedules" in str(unknown_command(79))
    assert unknown_command(4711).code == "unknown_command"
    assert "4711" in str(unknown_command(4711))
