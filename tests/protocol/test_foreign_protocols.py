"""A wrong port is named, in both directions."""

import pytest

from tfmq.errors import BadFrame
from tfmq.protocol import frames
from tfmq.protocol.frames import Decoder

GREETINGS = {
    b"GET / HTTP/1.1\r\n": "HTTP client",
    b"POST /x HTTP/1.1\r\n": "HTTP client",
    b"PRI * HTTP/2.0\r\n": "HTTP/2",
    b"HTTP/1.1 400 Bad Request\r\n": "HTTP server",
    b"SSH-2.0-OpenSSH_9.9\r\n": "SSH",
    b"-ERR unknown command\r\n": "Redis server",
    b"*1\r\n$4\r\nPING\r\n": "Redis client",
    b"INFO {}\r\n": "NATS",
    b"AMQP\x00\x00\x09\x01": "AMQP",
    b"220 mail ESMTP\r\n": "mail",
    b"UNKNOWN_COMMAND\r\n": "beanstalkd",
    b"\x16\x03\x01\x02\x00\x01\x00\x01": "TLS client",
    b"\x15\x03\x03\x00\x02\x02\x46": "TLS server",
}


@pytest.mark.parametrize("greeting", GREETINGS, ids=lambda greeting: repr(greeting[:8]))
def test_what_other_programs_say_first_is_recognised(greeting: bytes) -> None:
    with pytest.raises(BadFrame, match=GREETINGS[greeting]) as caught:
        Decoder().feed(greeting)
    assert "check host and port" in str(caught.value)


@pytest.mark.parametrize("word", [word for word, _ in frames._PROTOCOLS], ids=repr)
def test_every_word_is_looked_for_where_it_can_be_seen(word: bytes) -> None:
    assert 3 <= len(word) <= frames.DETECTION_BYTES
    with pytest.raises(BadFrame, match="At the other end is"):
        Decoder().feed(word.ljust(8, b" "))


def test_a_broken_frame_of_ours_is_called_that() -> None:
    with pytest.raises(BadFrame, match="larger than"):
        Decoder().feed(b"\xff\xff\xff\xff\x00\x00\x00\x00")


def test_a_browser_gets_an_answer_that_it_can_show() -> None:
    answer = frames.http_response(b"GET / HT", "127.0.0.1:8367")
    assert answer is not None
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and f"Content-Length: {len(text)}".encode() in head
    assert b"tfmq broker at 127.0.0.1:8367" in text


def test_no_other_client_gets_one() -> None:
    assert frames.http_response(b"SSH-2.0-", "x:1") is None
    assert frames.http_response(b"\x00\x00\x00\x08", "x:1") is None
