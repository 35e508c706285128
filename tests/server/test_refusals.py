"""Every reason not to start is one sentence that says what to do."""

import errno
import os

import pytest

from journal.errors import Corrupt, Full, JournalError, Locked, NewerFormat
from tfmq.errors import ConfigError, NotAllowed
from tfmq.server.main import exit_code, startup_sentence


def system(number: int, path: str = "/data/x") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Locked("/data/lock", "4711"), ["/data", "process 4711", "--data"]),
        (Locked("/data/lock"), ["another tfmq server", "--data"]),
        (NewerFormat("/data/meta/format", 9, 1), ["newer version", "9", "up to 1"]),
        (Full("no space"), ["no space left", "Make some"]),
        (
            Corrupt("/data/meta/node", 0, 9, "its checksum"),
            ["damaged", "/data/meta/node", "tfmq log repair /data", "backup"],
        ),
        (
            Corrupt("/data/transactions/0000000000000003.journal", 64, 96, "its checksum"),
            [
                "journal of transactions",
                "from 64 to 96",
                "tfmq log verify /data/transactions",
                "Nothing was changed",
            ],
        ),
        (JournalError("odd"), ["cannot start", "odd"]),
        (system(errno.EACCES), ["/data/x", "no rights"]),
        (system(errno.EROFS), ["read-only"]),
        (system(errno.ENOSPC), ["no space left"]),
        (system(errno.ENOTDIR), ["no folder"]),
        (system(errno.EISDIR), ["/data/x is a folder", "Move it away", "tfmq log repair /data"]),
        (
            Corrupt("/data/delay", 0, 0, "it is missing. Put it back, then start again"),
            ["not whole", "start again"],
        ),
        (system(errno.EMFILE), ["ulimit -n"]),
        (system(errno.EIO), ["cannot start", "/data/x"]),
        (NotAllowed("The port is taken."), ["The port is taken."]),
    ],
)
def test_a_reason_is_one_sentence_or_two_with_what_to_do(error: BaseException, words: list[str]) -> None:
    said = startup_sentence(error, "/data")
    assert said is not None
    assert all(word in said for word in words), said
    assert "\n" not in said
    assert exit_code(error) == 1


def test_a_wrong_configuration_is_wrong_usage() -> None:
    assert exit_code(ConfigError("x")) == 2


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    assert startup_sentence(ZeroDivisionError(), "/data") is None
