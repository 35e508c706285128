"""Planted bugs: what the API variants share: folders as addresses, forks, reactors, hooks, codecs."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FOLDERS: Final = "tests/client/connection/test_addresses.py"
IDLE: Final = "tests/server/test_server.py"
ADDRESS: Final = "tests//test_data_dir.py"
FORKS: Final = "tests/client/drivers/test_fork.py"
TWISTED: Final = "tests/client/drivers/test_twisted.py"
TRACING: Final = "tests/test_tracing.py"
CODECS: Final = "tests/test_codecs.py"

_DELIVERY = "tfmq/client/producer/delivery.py"
_FOLDERS = "tfmq/client/connection/addresses.py"
_IDLE = "tfmq/server/server.py"
_TWISTED = "tfmq/client/drivers/twisted.py"
_HOOKS = "tfmq/hooks.py"
_CODECS = "tfmq/codecs.py"

LOCAL_BROKERS: Final = (
    Mutant(
        "address-of-a-dead-broker-believed",
        "an address that is left by a kill is not used",
        _FOLDERS,
        "        if len(words) != 2 or words[1] != self._read_text(LOCK_NAME).strip() or not self._is_locked():\n",
        "        if len(words) != 2:\n",
        [FOLDERS],
    ),
    Mutant(
        "address-of-the-broker-before-believed",
        "the address of the previous broker is not used for the one that starts",
        _FOLDERS,
        "        if len(words) != 2 or words[1] != self._read_text(LOCK_NAME).strip() or not self._is_locked():\n",
        "        if len(words) != 2 or not self._is_locked():\n",
        [FOLDERS],
    ),
    Mutant(
        "each-starter-starts-one",
        "only one start runs at a time",
        _FOLDERS,
        (
            "                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "            except BlockingIOError:\n"
            '                raise self._not_ready_error("starts, or stops") from None\n'
        ),
        (
            "                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
            "            except BlockingIOError:\n"
            '                raise self._not_ready_error("starts, or stops") from None\n'
        ),
        [FOLDERS],
    ),
    Mutant(
        "started-broker-without-the-package",
        "a client of a checkout that is not installed starts the broker of that checkout",
        _FOLDERS,
        'os.path.dirname(__file__), "..", "..", "..")',
        'os.path.dirname(__file__), "..", "..")',
        [FOLDERS],
    ),
    Mutant(
        "starter-keeps-the-lock",
        "a broker that cannot be started releases the lock for others",
        _FOLDERS,
        "            if not handed_over:\n",
        "            if handed_over:\n",
        [FOLDERS],
    ),
    Mutant(
        "second-broker-beside-one-without-an-address",
        "no broker is started beside one that has locked the folder",
        _FOLDERS,
        ("            if self._is_locked():\n                owner = self._read_text(LOCK_NAME).strip()\n"),
        (
            "            if self._is_locked() and self._broker_started:\n"
            "                owner = self._read_text(LOCK_NAME).strip()\n"
        ),
        [FOLDERS],
    ),
    Mutant(
        "failed-start-tried-without-end",
        "a start that fails is reported with its last output",
        _FOLDERS,
        (
            "            if self._broker_started:\n"
            "                self._broker_started = False\n"
            "                raise self._start_error()\n"
        ),
        "",
        [FOLDERS],
    ),
    Mutant(
        "anywhere-is-an-address",
        "a broker that listens on all addresses is reached by the loopback address",
        _FOLDERS,
        "        return BrokerAddress(_WILDCARD_ADDRESSES.get(host, host), int(port))\n",
        "        return BrokerAddress(host, int(port))\n",
        [FOLDERS],
    ),
    Mutant(
        "path-relative-to-the-reader",
        "a relative path is relative to the caller",
        _FOLDERS,
        "        self.path = os.path.abspath(os.path.expanduser(path))\n",
        "        self.path = path\n",
        [FOLDERS],
    ),
    Mutant(
        "address-readable-in-half",
        "readers see the whole address or none",
        "tfmq/data_dir.py",
        "        os.replace(beside, path)\n",
        '        with open(path, "w", encoding="ascii") as half:\n            half.write(address)\n',
        [ADDRESS],
    ),
    Mutant(
        "full-disk-ends-the-server",
        "a disk that cannot store the address is logged, and the server serves",
        "tfmq/data_dir.py",
        '        logger.warning("%s could not be written, so file:%s does not find this broker: %s",',
        '        raise RuntimeError("%s could not be written: %s %s",',
        [ADDRESS],
    ),
    Mutant(
        "idle-server-stays",
        "a server that was started for its clients ends when it has no client",
        _IDLE,
        ("        self._running = True\n        self.check()\n"),
        "        self._running = True\n",
        [IDLE],
    ),
    Mutant(
        "idle-time-counts-while-a-client-is-connected",
        "a connected client keeps the server running",
        _IDLE,
        "            self._call.cancel()\n            self._call = None\n",
        "            self._call = None\n",
        [IDLE],
    ),
    Mutant(
        "every-server-ends-when-idle",
        "a server that was started by hand does not end when idle",
        _IDLE,
        "        idle = self._running and self._seconds > 0 and not self._sessions()\n",
        "        idle = self._running and not self._sessions()\n",
        [IDLE],
    ),
)

PROCESSES: Final = (
    Mutant(
        "child-has-its-parent-s-connection",
        "a forked child has a connection of its own",
        "tfmq/client/drivers/driver.py",
        "        _held.pop().reset_after_fork()\n",
        "        _held.pop().lock.release()\n",
        [FORKS],
    ),
    Mutant(
        "fork-in-the-middle-of-a-change",
        "a fork beside busy threads inherits no partial change",
        "tfmq/client/drivers/driver.py",
        "        driver.lock.acquire()\n        _held.append(driver)\n",
        "        _held.append(driver)\n",
        [FORKS],
    ),
    Mutant(
        "parent-stays-locked",
        "a fork does not affect the parent",
        "tfmq/client/drivers/driver.py",
        "    while _held:\n        _held.pop().lock.release()\n    _forking.release()\n",
        "    _held.clear()\n    _forking.release()\n",
        [FORKS],
    ),
)

REACTORS: Final = (
    Mutant(
        "waiter-goes-on-inside-of-what-woke-it",
        "a waiting caller continues in a turn of its own",
        _TWISTED,
        "        self._ready.append(sleep)\n        if not self._firing:\n"
        "            self._firing = True\n            self.reactor.callLater(0, self._fire)\n",
        "        if not sleep.called:\n            sleep.callback(None)\n",
        [TWISTED],
    ),
    Mutant(
        "flag-raised-in-the-wrong-thread",
        "a future that is set in another thread is resolved in the reactor",
        _TWISTED,
        "            self.reactor.callFromThread(event.complete)\n",
        "            event.complete()\n",
        [TWISTED],
    ),
    Mutant(
        "other-threads-use-the-reactor",
        "a call from another thread is refused with a message",
        _TWISTED,
        "        if self.reactor.running and not isInIOThread():\n",
        "        if self.reactor is None:\n",
        [TWISTED],
    ),
    Mutant(
        "cancelled-wait-is-remembered",
        "a cancelled caller leaves no state",
        "tfmq/client/drivers/event_loop.py",
        ("            for target in waited:\n                target.remove_done_callback(end)\n"),
        "            pass\n",
        [TWISTED],
    ),
    Mutant(
        "timer-of-a-wait-stays",
        "a wait that ended leaves no timer in the reactor",
        "tfmq/client/drivers/event_loop.py",
        "            if timer is not None:\n                self._cancel_call(timer)\n",
        "            pass\n",
        [TWISTED],
    ),
    Mutant(
        "error-of-an-awaited-callback-lost",
        "a callback's end and its exception are reported",
        _TWISTED,
        "            error = failure\n        done(error)\n",
        "            error = None if failure else failure\n        done(error)\n",
        [TWISTED],
    ),
)

AROUND: Final = (
    Mutant(
        "trace-of-another-message",
        "the span of a handler is a child of the span that sent its message",
        _HOOKS,
        "        sender = self._extract(properties)\n",
        "        sender = self._extract({})\n",
        [TRACING],
    ),
    Mutant(
        "span-never-left",
        "after a handler the previous span is active again",
        _HOOKS,
        "        self._context.detach(token)\n",
        "        self._context.get_current()\n",
        [TRACING],
    ),
    Mutant(
        "span-not-sent-along",
        "a message carries the span in which it was sent",
        _HOOKS,
        "self._inject(properties, self._trace",
        "self._inject({}, self._trace",
        [TRACING],
    ),
    Mutant(
        "user-s-traceparent-overwritten",
        "a trace context that the program set on a message is kept",
        _HOOKS,
        "        if TRACE_PARENT in properties:\n            return message\n",
        "",
        [TRACING],
    ),
    Mutant(
        "json-takes-not-a-number", "data that is sent as JSON is valid JSON", _CODECS, ", allow_nan=False", "", [CODECS]
    ),
    Mutant(
        "bad-json-raises-anything",
        "data that cannot be decoded raises a decode error",
        _CODECS,
        '            raise DecodeFailed(f"The payload is not JSON: {error}.") from error\n',
        "            raise\n",
        [CODECS],
    ),
    Mutant(
        "bad-msgpack-raises-anything",
        "data that cannot be decoded raises a decode error, with every codec",
        _CODECS,
        "        except (ValueError, TypeError, package.UnpackException, RecursionError) as error:\n",
        "        except KeyError as error:\n",
        [CODECS],
    ),
)

EXITS: Final = (
    Mutant(
        "failed-sends-are-forgotten-at-exit",
        "a failed send whose result was not read is logged when a program ends without closing its producer",
        _DELIVERY,
        "        unread = accumulator.pop_failures()\n        count = len(unread) - accumulator.failed_messages\n",
        "        unread: list[object] = []\n        count = -accumulator.failed_messages\n",
        ["tests/client/producer/test_interpreter_exit.py"],
    ),
)

API_VARIANTS: Final = EXITS + LOCAL_BROKERS + PROCESSES + REACTORS + AROUND
