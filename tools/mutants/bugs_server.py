"""Planted bugs: the wire and the server: what is accepted, what is bounded, which peer is disconnected."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FRAMES: Final = "tests/protocol/test_frames.py"
SESSION: Final = "tests/server/test_session.py"
TRANSPORT: Final = "tests/server/test_transport.py"
SERVICE: Final = "tests/server/test_server.py"
PACKING: Final = "tests/test_packing.py"

SERVER: Final = (
    Mutant(
        "oversize-frame-accepted",
        "a frame above the limit is refused after its first field",
        "tfmq/protocol/frames.py",
        "    if size > frame_bytes or size < 4:\n        start",
        "    if size < 4:\n        start",
        [FRAMES],
    ),
    Mutant(
        "undersize-frame-accepted",
        "a frame without space for its header size is refused",
        "tfmq/protocol/frames.py",
        "    if size > frame_bytes or size < 4:\n        start",
        "    if size > frame_bytes:\n        start",
        [FRAMES],
    ),
    Mutant(
        "header-size-unchecked",
        "a header that does not fit its frame is refused",
        "tfmq/protocol/frames.py",
        "    if header_size > size - 4:\n",
        "    if header_size < 0:\n",
        [FRAMES],
    ),
    Mutant(
        "header-size-unchecked-by-the-server",
        "a header that does not fit its frame ends the connection, and nothing beyond the frame is read",
        "tfmq/server/session.py",
        "            if header_size > len(frame) - 8 or header_size > limits.HEADER_BYTES:\n",
        "            if header_size > limits.HEADER_BYTES:\n",
        ["tests/server/test_promises.py"],
    ),
    Mutant(
        "header-nesting-unbounded",
        "the nesting of a header is limited",
        "tfmq/bounded_msgpack.py",
        "    if depth > limits.HEADER_DEPTH:\n",
        "    if depth < 0:\n",
        [PACKING],
    ),
    Mutant(
        "header-items-unbounded",
        "the objects that a header decodes to are limited by its size",
        "tfmq/bounded_msgpack.py",
        "    if items + count > items_max:\n",
        "    if items + count < 0:\n",
        [PACKING],
    ),
    Mutant(
        "large-frames-before-hello",
        "before hello only small frames are accepted",
        "tfmq/server/session.py",
        '        self.frame_bytes: int = welcome.limits["frame_bytes_before_hello"]\n',
        '        self.frame_bytes: int = welcome.limits["frame_bytes"]\n',
        [SESSION],
    ),
    Mutant(
        "commands-before-hello",
        "before hello no other command is accepted",
        "tfmq/server/session.py",
        "        if self._hello_timer is not None or entry is None:\n",
        "        if entry is None:\n",
        [SESSION],
    ),
    Mutant(
        "hello-has-no-time-limit",
        "a client that does not send hello in time is disconnected",
        "tfmq/server/session.py",
        '        self.transport.cut_off("it did not send HELLO in time")\n',
        "        return\n",
        [SESSION],
    ),
    Mutant(
        "unknown-command-ends-the-connection",
        "an unknown command gets an error reply, and the connection stays open",
        "tfmq/server/session.py",
        "                raise unknown_command(header[0])\n",
        '                raise BadFrame("unknown_command")\n',
        [SESSION],
    ),
    Mutant(
        "requests-in-flight-unbounded",
        "a client has a bounded number of requests in flight",
        "tfmq/server/session.py",
        "        if self._in_flight >= self._in_flight_max:\n",
        "        if self._in_flight < 0:\n",
        [SESSION],
    ),
    Mutant(
        "acks-none-gets-a-reply",
        "a send without acknowledgement gets no reply",
        "tfmq/server/session.py",
        "            reply.is_silent = request.acks == commands.ACKS_NONE\n",
        "            reply.is_silent = False\n",
        [SESSION],
    ),
    Mutant(
        "body-reused-while-it-waits",
        "a message's bytes stay untouched until they are written",
        "tfmq/server/session.py",
        "        held = hold.retain() if len(body) else None\n",
        "        held = None\n",
        [SESSION],
    ),
    Mutant(
        "connections-unbounded",
        "connections above the limit are refused, and the others stay open",
        "tfmq/server/server.py",
        "        if len(self._sessions) >= self._sessions_max:\n",
        "        if len(self._sessions) < 0:\n",
        [f"{SERVICE}::test_connections_above_the_limit_are_refused_and_the_others_go_on"],
    ),
    Mutant(
        "slow-reader-never-cut",
        "a peer that reads nothing is disconnected after its time-out",
        "tfmq/server/connection_limits.py",
        "                if now - since >= self._unsent_seconds:\n",
        "                if now < since:\n",
        [TRANSPORT],
    ),
    Mutant(
        "unsent-bytes-unbounded",
        "a peer with too many unsent bytes is disconnected",
        "tfmq/server/transport.py",
        "        if self.unsent_bytes > self._limits.unsent_bytes_max:\n",
        "        if self.unsent_bytes < 0:\n",
        [TRANSPORT],
    ),
    Mutant(
        "half-frame-waited-for-without-end",
        "an incomplete frame is not waited for without end",
        "tfmq/server/connection_limits.py",
        "            elif now - since >= PARTIAL_FRAME_SECONDS:\n",
        "            elif now < since:\n",
        [TRANSPORT],
    ),
    Mutant(
        "announced-size-allocated",
        "an announced size alone allocates no memory",
        "tfmq/server/connection_limits.py",
        "    return min(needed, max(PARTIAL_FRAME_BYTES_MIN, PARTIAL_FRAME_GROWTH * arrived))\n",
        "    return needed\n",
        ["tests/server/test_connection_limits.py"],
    ),
    Mutant(
        "arena-reused-while-held",
        "a buffer that is in use is not received into again",
        "tfmq/server/connection_limits.py",
        "        if self._position and self.buffer.holds == 1:\n",
        "        if self._position:\n",
        ["tests/server/test_connection_limits.py"],
    ),
    Mutant(
        "split-frame-lost",
        "frames are decoded however they are split",
        "tfmq/server/transport.py",
        "        self._leftover = bytes(view[position:])\n",
        '        self._leftover = b""\n',
        [TRANSPORT],
    ),
    Mutant(
        "buffer-not-given-back",
        "all memory of a connection is given back",
        "tfmq/server/transport.py",
        ("            self._limits.frame_done(self, tail.buffer.size)\n            tail.release()\n"),
        "            self._limits.frame_done(self, tail.buffer.size)\n",
        [TRANSPORT],
    ),
    Mutant(
        "buddies-overlap",
        "no two buffers overlap",
        "journal/buffers/arena.py",
        "            best = level if whole else min(left, right)\n",
        "            best = level if whole else min(left, right) - 1\n",
        ["tests/journal/buffers/test_arena.py"],
    ),
    Mutant(
        "double-release-accepted",
        "memory that was given back is not given back again",
        "journal/buffers/arena.py",
        "        if rest or number < 0 or not bit & self._all or bit & self._free:\n",
        "        if rest or number < 0 or not bit & self._all:\n",
        ["tests/journal/buffers/test_arena.py"],
    ),
    Mutant(
        "stop-does-not-fsync",
        "a clean stop makes accepted messages durable",
        "tfmq/broker/broker.py",
        '            close_cleanly(partition.log, f"{partition.name}-{partition.number}")\n',
        '            partition.log.abandon("stopped")\n',
        ["tests/broker/test_promises.py"],
    ),
    Mutant(
        "headers-without-bounds",
        "surplus values of a request are refused before they are decoded",
        "tfmq/server/session.py",
        "            header = frames.decode_header(frame[8 : 8 + header_size], self._context.header_bounds)\n",
        "            header = frames.decode_header(frame[8 : 8 + header_size])\n",
        [
            "tests/server/test_session.py::test_a_request_with_surplus_values_is_refused_and_the_connection_ends"
        ],
    ),
    Mutant(
        "headers-with-surplus-rows",
        "surplus values in the lists of a request are refused before they are decoded",
        "tfmq/protocol/frames.py",
        "    return items_max\n",
        "    return limits.HEADER_ITEMS\n",
        ["tests/protocol/test_frames.py::test_surplus_values_are_refused_before_they_are_decoded"],
    ),
    Mutant(
        "work-lost-without-a-thread",
        "work is executed also where no thread can be started",
        "tfmq/server/reactor.py",
        "        if not self._threads:\n",
        "        if not self._threads and not self._short_told:\n",
        ["tests/server/test_workers.py::test_work_is_done_also_where_no_more_threads_can_be_started"],
    ),
    Mutant(
        "a-stop-without-memory-hangs",
        "a stop without memory ends",
        "tfmq/broker/broker.py",
        "    except (OSError, JournalError, MemoryError) as error:\n",
        "    except (OSError, JournalError) as error:\n",
        ["tests/broker/test_broker.py::test_a_stop_without_memory_ends_and_the_next_start_has_everything"],
    ),
    Mutant(
        "expensive-requests-served-with-their-read",
        "expensive requests of many connections do not delay a cheap one of another",
        "tfmq/server/transport.py",
        "                and is_expensive(view, position, whole)\n",
        "                and whole < 0\n",
        [f"{TRANSPORT}::test_expensive_requests_of_many_connections_wait_for_the_cheap_one_of_another"],
    ),
    Mutant(
        "a-long-form-hides-a-list-command",
        "a list command in an encoding that is longer than necessary is as expensive",
        "tfmq/server/transport.py",
        "TO_CHECK = LISTS | UNSIGNED.keys() | {0, METADATA}\n",
        "TO_CHECK = LISTS | {METADATA}\n",
        [f"{TRANSPORT}::test_expensive_requests_of_many_connections_wait_for_the_cheap_one_of_another"],
    ),
    Mutant(
        "a-turn-without-a-bound",
        "a turn over all connections is bounded in time",
        "tfmq/server/reactor.py",
        "                if turn is not None and turn.handling_seconds > TURN_SECONDS:\n",
        "                if turn is None:\n",
        [
            "tests/server/test_reactor.py::"
            "test_a_turn_that_was_too_short_ends_and_the_next_one_begins_with_the_least_served"
        ],
    ),
    Mutant(
        "deferred-in-the-order-of-their-reads",
        "a connection with cheap requests left is served before idle ones with an expensive one",
        "tfmq/server/connection_limits.py",
        "        waiting = sorted(self.deferred, key=lambda connection: connection.served_until)\n",
        "        waiting = list(self.deferred)\n",
        [
            f"{TRANSPORT}::"
            "test_a_connection_with_cheap_requests_left_is_served_before_idle_ones_with_an_expensive_one"
        ],
    ),
    Mutant(
        "a-fixed-reserve-of-descriptors",
        "with a low limit of open files connections are accepted nevertheless",
        "tfmq/server/listener.py",
        "free - min(DESCRIPTORS_KEPT, free // 2)",
        "free - DESCRIPTORS_KEPT",
        ["tests/server/test_listener.py::test_a_low_limit_of_open_files_leaves_half_of_them_to_connections"],
    ),
    Mutant(
        "a-message-above-the-limit-stored",
        "no message above limits.message_bytes is stored, whatever limit the client has",
        "tfmq/broker/produce.py",
        "        if size > self._message_bytes_max:\n",
        "        if size > self._record_bytes_max:\n",
        [
            "tests/broker/test_produce.py::"
            "test_a_message_above_the_limit_is_refused_and_one_at_the_limit_with_attributes_is_not"
        ],
    ),
)
