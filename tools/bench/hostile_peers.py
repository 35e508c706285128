"""Hostile peers for `tools.bench.hostile`, in a process of their own: `python -m tools.bench.hostile_peers JSON`.

One thread with one epoll runs as many connections at a time to a port of loopback as the attack has. Each goes through
the steps of the attack; what follows depends on the way: `hold` keeps it open, `flood` closes it and opens another,
`drip` sends one byte a second, `sip` reads one byte a second. A connection that the broker ends is opened again.
Everything is bounded: by the number of connections, by TOTAL_MAX, by SECONDS_MAX, and by standard input, at whose end
the program prints what it did and exits. It runs at the lowest priority: attackers elsewhere take no processor time of
this machine.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgpack

from tfmq import limits
from tfmq.protocol import commands
from tfmq.tls import TlsSocket, client_context
from tools.bench.load import PREFIX, frame

TOTAL_MAX: Final = 500_000
SECONDS_MAX: Final = 120.0
READY_SECONDS: Final = 15.0
CONNECTS_AT_ONCE: Final = 64
"""Connections opened in one round, so that others are served in between."""
DRIP_SECONDS: Final = 1.0
READ_BYTES: Final = 1 << 16
SMALL_BUFFER: Final = 2048
OPEN_FILES_KEPT: Final = 64
NETWORKS: Final = 8
"""Connections begin at 127.0.1.1 to 127.0.1.NETWORKS, each with ports of its own."""
LINGER_RESET: Final = struct.pack("ii", 1, 0)
"""Closing resets the connection, so that no port is kept for a minute."""
WAY_HOLD, WAY_FLOOD, WAY_DRIP, WAY_SIP = "hold", "flood", "drip", "sip"

Step = Callable[[bytes], bytes]
"""Makes what is sent next from the last reply (b"" at first)."""


class Attack(NamedTuple):
    """What so many connections at a time do. `steps`: what each sends, one after each reply; then `way`."""

    way: str
    connections: int
    steps: tuple[Step, ...]
    drip: bytes = b""
    """What is sent byte by byte, again and again."""


def sends(data: bytes) -> Step:
    return lambda reply: data


HELLO: Final = frame([1, 1, commands.MAGIC, commands.VERSION_MIN, commands.VERSION_MAX, "hostile", {}])


def client_hello() -> bytes:
    """Return the first bytes of a TLS handshake. The same bytes begin any number of handshakes."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        TlsSocket(near, client_context(), server_hostname="broker.example").start()
        return far.recv(READ_BYTES)


def nested(levels: int) -> bytes:
    """Return a frame whose header has so many lists inside each other."""
    header = b"\x92\x0a\x02" + b"\x91" * levels + b"\xc0"
    return PREFIX.pack(4 + len(header), len(header)) + header


def wide(items: int) -> bytes:
    """Return a frame whose header announces a list of `items` in each item, as far as it goes."""
    header = b"\x93\x0a\x02" + (b"\xdd" + struct.pack(">I", items)) * (limits.FRAME_BYTES_BEFORE_HELLO // 8)
    return PREFIX.pack(4 + len(header), len(header)) + header


def wrong_login() -> tuple[Step, ...]:
    """The steps of a login with a wrong password."""
    first = b"n,,n=nobody,r=0123456789abcdef"

    def proof(reply: bytes) -> bytes:
        answer = bytes(msgpack.unpackb(reply[8 : 8 + PREFIX.unpack_from(reply)[1]])[2]).decode()
        nonce = answer.partition("r=")[2].partition(",")[0]
        final = f"c=biws,r={nonce},p={'A' * 43}=".encode()
        return frame([5, 3, "SCRAM-SHA-256", final])

    return sends(HELLO), sends(frame([5, 2, "SCRAM-SHA-256", first])), proof


def fetch(topic: str, incarnation: int) -> bytes:
    """Return a request for as much as a fetch may return, from the start of the partition."""
    return frame([30, 2, topic, incarnation, 0, 0, -1, int(limits.FETCH_BYTES), 0])


def attack(name: str, count: int, details: dict[str, Any]) -> Attack:
    """Return the attack of that name. Raises KeyError if there is none."""
    http = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    over = struct.pack(">I", 0xFFFFFFF0)
    big_frame = struct.pack(">II", 1 << 20, 64) + HELLO[8:]

    def slow_readers() -> Attack:
        request = fetch(details["topic"], details["incarnation"])
        return Attack(WAY_SIP, count, (sends(HELLO), sends(request)))

    made: dict[str, Callable[[], Attack]] = {
        "silent": lambda: Attack(WAY_HOLD, count, ()),
        "one byte of TLS": lambda: Attack(WAY_HOLD, count, (sends(b"\x16"),)),
        "no login": lambda: Attack(WAY_HOLD, count, (sends(HELLO),)),
        "slow writers": lambda: Attack(WAY_DRIP, count, (sends(HELLO), sends(big_frame[:8])), drip=big_frame[8:]),
        "slow readers": slow_readers,
        "slow readers of large messages": slow_readers,
        "slow handshakes": lambda: Attack(WAY_DRIP, count, (), drip=client_hello()),
        "connections": lambda: Attack(WAY_FLOOD, count, ()),
        "handshakes": lambda: Attack(WAY_FLOOD, count, (sends(client_hello()),)),
        "oversize frames": lambda: Attack(WAY_FLOOD, count, (sends(over + bytes(64)),)),
        "oversize headers": lambda: Attack(WAY_FLOOD, count, (sends(HELLO), sends(over[:3] + b"\xff" + over))),
        "nesting": lambda: Attack(WAY_FLOOD, count, (sends(HELLO), sends(nested(60_000)))),
        "wide headers": lambda: Attack(WAY_FLOOD, count, (sends(wide(1 << 16)),)),
        "failing logins": lambda: Attack(WAY_FLOOD, count, wrong_login()),
        "HTTP, silent": lambda: Attack(WAY_HOLD, count, ()),
        "HTTP, slow headers": lambda: Attack(WAY_DRIP, count, (sends(http),), drip=b"X-More: 1\r\n"),
        "HTTP, many headers": lambda: Attack(WAY_FLOOD, count, (sends(http + b"X-More: 1\r\n" * 5_000),)),
        "HTTP, long header": lambda: Attack(WAY_FLOOD, count, (sends(http + b"X-More: " + b"1" * 60_000),)),
        "HTTP, requests": lambda: Attack(WAY_FLOOD, count, (sends(http + b"\r\n"),)),
    }
    return made[name]()


class Peer:
    """One connection, with the step that it is at."""

    __slots__ = ("drip_position", "held", "sock", "step")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.step = 0
        self.drip_position = 0
        self.held = False


class Peers:
    """All connections of an attack."""

    def __init__(self, made: Attack, address: tuple[str, int]) -> None:
        self.attack, self.address = made, address
        self.poll = select.epoll()
        self.peers: dict[int, Peer] = {}
        self.due: deque[tuple[float, int, Peer]] = deque()
        self.counts: Counter[str] = Counter()
        self.held_count = 0
        """Connections that have done all of their steps, and are open."""
        self.wanted_max = raise_open_files(made.connections)

    def run(self) -> None:
        """Attack until standard input ends. Print "ready" as soon as all connections have done all of their steps.

        A flood is ready when all are open, and other attacks after READY_SECONDS at the latest: the broker may end some
        connections sooner than others are open.
        """
        self.poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
        until, is_ready = time.monotonic() + SECONDS_MAX, False
        while time.monotonic() < until:
            for _ in range(min(CONNECTS_AT_ONCE, self.wanted_max - len(self.peers))):
                if self.counts["opened"] >= TOTAL_MAX or not self.open():
                    break
            if not is_ready and (self.is_complete() or time.monotonic() > until - SECONDS_MAX + READY_SECONDS):
                is_ready = True
                print("ready", flush=True)
            for descriptor, event in self.poll.poll(0 if len(self.peers) < self.wanted_max else 0.05, 256):
                if descriptor == sys.stdin.fileno():
                    return
                self.serve(descriptor, event)
            self.serve_due()

    def is_complete(self) -> bool:
        """Return whether the attack has its full strength."""
        at_once = len(self.peers) if self.attack.way == WAY_FLOOD else self.held_count
        return at_once >= self.wanted_max

    def open(self) -> bool:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        if self.attack.way == WAY_SIP:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            sock.bind((f"127.0.1.{1 + self.counts['opened'] % NETWORKS}", 0))
            error = sock.connect_ex(self.address)
        except OSError as refused:
            error = refused.errno or errno.EIO
        if error not in (0, errno.EINPROGRESS):
            self.counts[errno.errorcode.get(error, str(error))] += 1
            sock.close()
            return False
        self.counts["opened"] += 1
        self.peers[sock.fileno()] = Peer(sock)
        self.poll.register(sock.fileno(), select.EPOLLOUT)
        return True

    def close(self, descriptor: int) -> None:
        peer = self.peers.pop(descriptor)
        self.held_count -= peer.held
        self.poll.unregister(descriptor)
        peer.sock.close()

    def serve(self, descriptor: int, event: int) -> None:
        peer = self.peers.get(descriptor)
        if peer is None:
            return
        try:
            if event & select.EPOLLOUT:
                self.poll.modify(descriptor, select.EPOLLIN)
                self.advance(peer, b"")
            elif peer.held and self.attack.way == WAY_SIP:
                self.poll.modify(descriptor, 0)
                self.due.append((time.monotonic() + DRIP_SECONDS, descriptor, peer))
            else:
                reply = peer.sock.recv(READ_BYTES)
                if not reply:
                    self.counts["ended by the broker"] += 1
                    self.close(descriptor)
                    return
                self.counts["replies"] += 1
                self.advance(peer, reply)
        except BlockingIOError:
            pass
        except (OSError, ValueError, IndexError, TypeError, KeyError):
            self.counts["cut off"] += 1
            self.close(descriptor)

    def advance(self, peer: Peer, reply: bytes) -> None:
        """Send the next step; after the last one, do what the way says."""
        made, descriptor = self.attack, peer.sock.fileno()
        if peer.step < len(made.steps):
            peer.step += 1
            peer.sock.send(made.steps[peer.step - 1](reply))
            if peer.step < len(made.steps) or made.way == WAY_FLOOD:
                return
        if made.way == WAY_FLOOD:
            self.counts["rounds"] += 1
            self.close(descriptor)
        elif not peer.held:
            peer.held = True
            self.held_count += 1
            if made.way == WAY_DRIP:
                self.due.append((time.monotonic() + DRIP_SECONDS, descriptor, peer))

    def serve_due(self) -> None:
        """Send or read one byte on each connection whose second is over."""
        now = time.monotonic()
        while self.due and self.due[0][0] <= now:
            at, descriptor, peer = self.due.popleft()
            if self.peers.get(descriptor) is not peer:
                continue
            try:
                if self.attack.way == WAY_DRIP:
                    position = peer.drip_position
                    peer.drip_position = (position + 1) % len(self.attack.drip)
                    peer.sock.send(self.attack.drip[position : position + 1])
                elif not peer.sock.recv(1):
                    raise ConnectionResetError
                self.counts["slow bytes"] += 1
            except BlockingIOError:
                pass
            except OSError:
                self.counts["cut off"] += 1
                self.close(descriptor)
                continue
            self.due.append((at + DRIP_SECONDS, descriptor, peer))


def raise_open_files(count: int) -> int:
    """Raise the soft limit of open files; return how many connections it allows, at most `count`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OPEN_FILES_KEPT
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(count, soft - OPEN_FILES_KEPT)


def main() -> None:
    os.nice(19)
    wish = json.loads(sys.argv[1])
    host, _, port = wish["address"].rpartition(":")
    peers = Peers(attack(wish["attack"], wish["count"], wish["details"]), (host, int(port)))
    peers.run()
    print(json.dumps({**peers.counts, "open": len(peers.peers)}), flush=True)


if __name__ == "__main__":
    main()
