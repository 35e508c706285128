"""`tfmq completion` prints what a shell can evaluate."""

import pytest
from click.testing import CliRunner

from tfmq.cli.main import commands


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    result = CliRunner().invoke(commands, ["completion", shell])
    assert result.exit_code == 0
    assert "_TFMQ_COMPLETE" in result.output


def test_another_shell_is_wrong_usage() -> None:
    result = CliRunner().invoke(commands, ["completion", "csh"])
    assert result.exit_code == 2
    assert "csh" in result.output
