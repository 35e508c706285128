"""What other protocols say first, so that a wrong port is named instead of called a broken frame."""

LOOK_BYTES = 8

EMPTY_LINE = "\r\n\r\n"
"""Ends a client's hello, so that a program that waits for lines of text, as an HTTP server does, complains at once."""

_HTTP = "an HTTP client or browser"
# The first bytes, and who sends them.
_SPEAKERS: tuple[tuple[bytes, str], ...] = (
    *(
        (word, _HTTP)
        for word in (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC", b"TRAC", b"CONN")
    ),
    (b"PRI ", "an HTTP/2 client"),
    (b"HTTP", "an HTTP server"),
    (b"<!DO", "an HTTP server"),
    (b"<htm", "an HTTP server"),
    (b"<HTM", "an HTTP server"),
    (b"SSH-", "an SSH program"),
    (b"-ERR", "a Redis server"),
    (b"+PON", "a Redis server"),
    (b"-NOA", "a Redis server"),
    (b"-DEN", "a Redis server"),
    (b"*1\r\n", "a Redis client"),
    (b"*2\r\n", "a Redis client"),
    (b"*3\r\n", "a Redis client"),
    (b"PING", "a Redis or NATS client"),
    (b"INFO", "a NATS server"),
    (b"AMQP", "an AMQP program, such as RabbitMQ"),
    (b"220 ", "a mail or FTP server"),
    (b"220-", "a mail or FTP server"),
    (b"RFB ", "a VNC server"),
    (b"UNKN", "a beanstalkd server"),
    (b"\x16\x03\x01", "a TLS client"),
    (b"\x16\x03\x03", "a TLS program"),
    (b"\x15\x03\x01", "a TLS server"),
    (b"\x15\x03\x03", "a TLS server"),
)


def speaker(start: bytes) -> str | None:
    """Who says `start` first, if it is one of those known: "an HTTP server"."""
    return next((who for word, who in _SPEAKERS if start.startswith(word)), None)


def sentence(start: bytes) -> str | None:
    """What to tell of it, if anything."""
    who = speaker(start)
    return who and f"At the other end is {who}, not a program that speaks tfmq: check host and port."


def http_answer(start: bytes, host_and_port: str) -> bytes | None:
    """An answer that an HTTP client can show, where `start` comes from one."""
    if speaker(start) != _HTTP:
        return None
    text = f"This is a tfmq broker at {host_and_port}; it speaks its own protocol, not HTTP.\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + text
