"""Signals while handlers run: one ends in order, two at once; afterwards all is as it was."""

import os
import signal
import threading

import pytest

from tfmq.client.worker.runner import EXIT_CODE_BASE, SignalHandlers, immediate_exit


def test_the_first_one_stops_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped = []
    with pytest.raises(SystemExit) as ended, SignalHandlers(lambda: stopped.append(True)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped == [True]
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == EXIT_CODE_BASE + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert isinstance(immediate_exit(signal.SIGINT), KeyboardInterrupt)


def test_ctrl_c_is_no_keyboard_interrupt_the_first_time() -> None:
    before = signal.getsignal(signal.SIGINT)
    stopped = []
    with SignalHandlers(lambda: stopped.append(True)):
        os.kill(os.getpid(), signal.SIGINT)
    assert stopped == [True]
    assert signal.getsignal(signal.SIGINT) is before, "whoever ran it has his signals back"


def test_unwanted_or_in_another_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalHandlers(lambda: None, wanted=False):
        assert signal.getsignal(signal.SIGTERM) is before
    found = []

    def elsewhere() -> None:
        with SignalHandlers(lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
