"""The command line as a person and a shell use it: processes, pipes, signals, exit codes, a damaged data folder."""

import base64
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tfmq as client
from tests.e2e.commands import PATIENCE_SECONDS, TFMQ, command, environment, tfmq
from tests.e2e.reading import stored
from tools.rigs.live_server import LiveServer

SECONDS = 30.0


@contextmanager
def started(broker: LiveServer, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A `tfmq` that goes on for a while; killed at the end if it is still there."""
    process = subprocess.Popen(
        command(TFMQ, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(broker.address),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def shell(broker: LiveServer, line: str) -> subprocess.CompletedProcess[bytes]:
    """A line for bash, in which `tfmq` is ours."""
    words = " ".join(f"'{word}'" for word in command(TFMQ, ()))
    script = f'set -o pipefail; tfmq() {{ {words} "$@"; }}; {line}'
    ran = subprocess.run(
        ["bash", "-c", script], capture_output=True, timeout=PATIENCE_SECONDS, env=environment(broker.address)
    )
    assert b"Traceback" not in ran.stderr, ran.stderr
    return ran


@pytest.mark.long
def test_the_first_program_of_the_readme(broker: LiveServer) -> None:
    assert tfmq("send", "greetings", "hello", servers=broker.address).code == 0
    read = tfmq("read", "greetings", servers=broker.address)
    assert (read.code, read.out, read.err) == (0, b"hello\n", "")


@pytest.mark.long
def test_what_read_prints_send_takes(broker: LiveServer, topic: str) -> None:
    messages = [
        client.Message(b"text"),
        client.Message("ünïcode\nwith a line end", key="k", tag="t", properties={"a": "1", "b": "zwei"}),
        client.Message(bytes(range(256)), key=b"\xff\x00", tag="t"),
        client.Message(None, key="gone"),
        client.Message(b"", key=""),
        client.Message(b"x" * 1_000_000),
        client.Message(b'{"json": true}', properties={"quote": '"'}),
    ]
    with client.Producer(broker.address) as producer:
        for message in messages:
            producer.send(topic, message)
    copied = shell(broker, f"tfmq read {topic} --json | tfmq send {topic}-copy --json")
    assert copied.returncode == 0, copied.stderr
    assert json.loads(copied.stdout) == {"topic": f"{topic}-copy", "count": 7, "durability": "synced"}
    rows = [
        [
            {name: row.get(name) for name in ("key", "key_base64", "tag", "properties", "payload", "payload_base64")}
            for row in map(json.loads, tfmq("read", name, "--json", servers=broker.address).out.splitlines())
        ]
        for name in (topic, f"{topic}-copy")
    ]
    assert rows[0] == rows[1]
    assert [row["payload"] for row in rows[0][:2]] == ["text", "ünïcode\nwith a line end"]
    assert base64.b64decode(rows[0][2]["payload_base64"]) == bytes(range(256))
    found = stored(broker.address, f"{topic}-copy")
    assert [(m.payload, m.key, m.tag, m.properties) for m in found] == [
        (m.payload.encode() if isinstance(m.payload, str) else m.payload, m.key, m.tag, m.properties or {})
        for m in messages
    ]


@pytest.mark.long
def test_a_pipe_whose_reader_goes_is_no_error(broker: LiveServer, topic: str) -> None:
    sent = shell(broker, f"seq 200000 | tfmq send {topic}")
    said = f"created topic {topic} (1 partition)\nsent 200,000 messages to {topic} (synced)\n"
    assert (sent.returncode, sent.stderr.decode()) == (0, said)
    headed = shell(broker, f"tfmq read {topic} | head -n 3")
    assert (headed.returncode, headed.stdout, headed.stderr) == (0, b"1\n2\n3\n", b"")
    assert shell(broker, f"tfmq read {topic} --json | head -n 1 | wc -l").stdout.strip() == b"1"
    assert shell(broker, f"tfmq read {topic} | sort -n | uniq | wc -l").stdout.strip() == b"200000"


@pytest.mark.long
def test_a_group_whose_output_broke_has_not_acked_it(broker: LiveServer, topic: str) -> None:
    shell(broker, f"seq 100000 | tfmq send {topic}")
    assert shell(broker, f"tfmq read {topic} -g {topic} | head -n 1").stdout == b"1\n"
    rest = tfmq("read", topic, "-g", topic, servers=broker.address).out.split()
    assert rest[-1] == b"100000"
    assert int(rest[0]) < 20_000, "at least once: nothing is skipped that nobody saw"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_goes_on_until_it_is_interrupted(broker: LiveServer, topic: str, number: int) -> None:
    tfmq("send", topic, "first", servers=broker.address)
    with started(broker, "read", topic, "--follow", "-g", topic) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"first\n"
        tfmq("send", topic, "second", servers=broker.address)
        assert follower.stdout.readline() == b"second\n"
        follower.send_signal(number)
        out, err = follower.communicate(timeout=SECONDS)
        assert follower.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
        assert out == b""
        assert b"Traceback" not in err
    again = tfmq("read", topic, "-g", topic, servers=broker.address)
    assert again.code == 0
    assert again.out in (b"", b"second\n", b"first\nsecond\n"), "at least once"


@pytest.mark.long
def test_a_stream_is_sent_as_it_comes_and_ctrl_c_loses_nothing_of_it(broker: LiveServer, topic: str) -> None:
    with started(broker, "send", topic) as sender:
        assert sender.stdin is not None
        sender.stdin.write(b"one\ntwo\n")
        sender.stdin.flush()
        until = time.monotonic() + SECONDS
        while (found := tfmq("read", topic, servers=broker.address).out) != b"one\ntwo\n":
            assert time.monotonic() < until, f"lines wait in the sender: {found!r}"
        sender.stdin.write(b"three\n")
        sender.stdin.flush()
        time.sleep(0.3)
        sender.send_signal(signal.SIGINT)
        _, err = sender.communicate(timeout=SECONDS)
        assert sender.returncode == 130
        assert b"Traceback" not in err
    assert tfmq("read", topic, servers=broker.address).out == b"one\ntwo\nthree\n"


@pytest.mark.long
def test_following_outlives_a_restart_of_the_broker(broker: LiveServer, topic: str) -> None:
    tfmq("send", topic, "before", servers=broker.address)
    with started(broker, "read", topic, "--follow") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"before\n"
        broker.kill()
        broker.start()
        tfmq("send", topic, "after", servers=broker.address)
        assert follower.stdout.readline() == b"after\n"
        follower.send_signal(signal.SIGINT)
        _, err = follower.communicate(timeout=SECONDS)
        assert b"Traceback" not in err


@pytest.mark.long
def test_output_that_cannot_be_written_is_reported(broker: LiveServer, topic: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("cannot be had here: /dev/full")
    tfmq("send", topic, "x" * 100_000, servers=broker.address)
    ran = shell(broker, f"tfmq read {topic} -g {topic} > /dev/full")
    assert ran.returncode == 1
    assert b"No space left" in ran.stderr
    assert tfmq("read", topic, "-g", topic, servers=broker.address).out == b"x" * 100_000 + b"\n"


# A damaged partition, from the first sign to the mended log


@pytest.fixture
def damaged(tmp_path: Path) -> LiveServer:
    """A stopped broker with 30 messages, of which a bit flipped in the block of 10 to 19."""
    server = LiveServer(tmp_path / "data")
    server.start()
    with client.Producer(server.address) as producer:
        for start in (0, 10, 20):  # ten at a time, so that each ten have a block of their own
            producer.send_many("orders", lines(*range(start, start + 10))).result(PATIENCE_SECONDS)
    server.stop()
    (segment,) = (server.data / "orders-0").glob("*.zxQueue")
    data = bytearray(segment.read_bytes())
    data[data.index(b"message 14") + 9] ^= 1
    segment.write_bytes(data)
    return server


def lines(*numbers: int) -> list[bytes]:
    return [b"message %d" % number for number in numbers]


@pytest.mark.long
def test_read_prints_the_rest_names_the_range_and_exits_with_4(damaged: LiveServer) -> None:
    (place,) = json.loads(tfmq("log", "verify", str(damaged.data), "--json").out)["findings"]
    damaged.start()
    for options in ([], ["-g", "billing"], ["--json"]):
        ran = tfmq("read", "orders", *options, servers=damaged.address)
        assert ran.code == 4
        if "--json" in options:
            assert [json.loads(line)["ordinal"] for line in ran.out.splitlines()] == [*range(10), *range(20, 30)]
        else:
            assert ran.out.splitlines() == lines(*range(10), *range(20, 30))
        (reported,) = ran.err.splitlines()
        assert reported.startswith("tfmq: ")
        assert str(place["first"]) in reported
        assert str(place["next"]) in reported
    assert tfmq("send", "orders", "more", servers=damaged.address).code == 0
    assert tfmq("read", "orders", servers=damaged.address).out.splitlines()[-1] == b"more"
    damaged.stop()


@pytest.mark.long
def test_verify_repair_verify_read(damaged: LiveServer) -> None:
    data = str(damaged.data)
    found = tfmq("log", "verify", data, "--json")
    assert found.code == 4
    assert json.loads(found.out)["damaged"]
    assert "damaged" in tfmq("log", "verify", data).err
    assert tfmq("log", "dump", data + "/orders-0").code == 4
    dry = tfmq("log", "repair", data, "--dry-run")
    assert (dry.code, tfmq("log", "verify", data).code) == (0, 4)
    mended = tfmq("log", "repair", data, "--json")
    assert mended.code == 0
    assert [(row["kept"], row["lost"]) for row in json.loads(mended.out)] == [(9, 1)]
    assert tfmq("log", "verify", data, "--records").code == 0
    damaged.start()
    read = tfmq("read", "orders", servers=damaged.address)
    assert read.code == 0
    assert read.out.splitlines() == lines(*range(14), *range(15, 30))
    rows = [json.loads(line) for line in tfmq("read", "orders", "--json", servers=damaged.address).out.splitlines()]
    assert [row["ordinal"] for row in rows] == [*range(14), *range(15, 30)], "what was lost keeps its ordinal"
    assert tfmq("send", "orders", "message 30", servers=damaged.address).code == 0
    damaged.stop()
    assert tfmq("log", "verify", data, "--records").code == 0
    assert tfmq("log", "repair", data, "--remove-originals").code == 0
