"""Bad days of an object store: each ends in one sentence, without credentials, and says whether to wait or to act."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority
from tfmq.replication.errors import ReplicationError, StoreRefused, StoreUnavailable
from tfmq.replication.store import Store
from tfmq.replication.stores import object_store
from tfmq.replication.stores.open_store import open_store
from tools.rigs.s3 import READER, READER_SECRET, S3Server


def said_by(store: Store, call: Callable[[Store], object], kind: type[ReplicationError]) -> str:
    with pytest.raises(kind) as caught:
        call(store)
    text = str(caught.value)
    assert store.name in text and "\n" not in text and len(text) < 500 and text.endswith("."), text
    assert caught.value.__cause__ is None and "hunter2" not in text
    return text


CALLS: list[Callable[[Store], object]] = [
    lambda store: store.put_new("entries/1", b"1"),
    lambda store: store.get("entries/1"),
    lambda store: list(store.list("entries/")),
    lambda store: store.delete("entries/1"),
]


def test_without_the_bucket_it_does_not_look_empty(s3: S3Server, credentials: None) -> None:
    store = open_store(s3.url("p", bucket="nowhere"))
    for call in CALLS:
        assert "has no bucket 'nowhere': create it, or correct the URL." in said_by(store, call, StoreRefused)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("AWS_ACCESS_KEY_ID", "hunter2", "InvalidAccessKeyId"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2", "SignatureDoesNotMatch"),
    ],
)
def test_wrong_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str) -> None:
    monkeypatch.setenv(name, value)
    store = open_store(s3_url)
    for call in CALLS:
        text = said_by(store, call, StoreRefused)
        assert f"refuses the credentials ({code}: " in text and "set AWS_ACCESS_KEY_ID and AWS_SECRET_AC" in text


def test_without_the_right_to_write(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_url).put_new("replica", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    store = open_store(s3_url)
    assert store.get("replica") == b"1" and [each.key for each in store.list("")] == ["replica"]
    text = said_by(store, CALLS[0], StoreRefused)
    assert (
        "does not permit a put of entries/1 (AccessDenied: " in text and "rights to read, write, list and del" in text
    )
    said_by(store, lambda store: store.delete("replica"), StoreRefused)
    assert store.get("replica") == b"1"


def test_nobody_listens(credentials: None) -> None:
    store = open_store("s3://tfmq/p?endpoint=http://127.0.0.1:1")
    for call in CALLS:
        assert "does not answer a " in said_by(store, call, StoreUnavailable)
    assert "Connection refused." in said_by(store, CALLS[1], StoreUnavailable)


@contextmanager
def https_server(authority: Authority) -> Iterator[str]:
    """Context of a server with TLS whose answers are those of `Answers`. Yields its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("127.0.0.1"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_certificate_of_an_unknown_authority(authority: Authority, credentials: None) -> None:
    with https_server(authority) as endpoint:
        text = said_by(open_store(f"s3://tfmq/p?endpoint={endpoint}"), CALLS[0], StoreUnavailable)
        assert "its certificate is not trusted (UnknownIssuer); SSL_CERT_FILE can name the authority's." in text


def test_a_server_that_does_not_answer_is_left_in_time(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CALL_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store(f"s3://tfmq/p?endpoint=http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        assert "does not answer a put of entries/1: no answer within 1 s." in said_by(store, CALLS[0], StoreUnavailable)
        assert time.monotonic() - begun < 20


def test_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    store = open_store("s3://tfmq/p?endpoint=http://127.0.0.1:1")
    for call in CALLS:
        text = said_by(store, call, StoreUnavailable)
        assert text.startswith("No credentials for the store") and "are not set, and this machine's cloud gives" in text
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hunter2")
    with pytest.raises(
        StoreRefused, match=r"cannot be used: Missing SecretAccessKey \(credentials are taken from AWS_"
    ):
        open_store("s3://tfmq/p?endpoint=http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3://", "names no bucket: write s3://BUCKET/PREFIX"),
        ("s3:///prefix", "names no bucket"),
        ("s3://host:9000/tfmq", "names no bucket"),
        ("s3://AKIA1:hunter2@tfmq/p", "has credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the env"),
        ("s3://tfmq/p?secret_access_key=hunter2", "knows no parameter 'secret_access_key', only endpoint, region, "),
        ("s3://tfmq/p?hunter2", "cannot be read"),
        ("s3://tfmq/a_b", "a prefix has ASCII letters"),
        ("s3://tf mq/a", "The bucket in the URL of the object store has other characters than ASCII letters"),
        ("gs://tf%20mq/a", "The bucket in the URL of the object store has other characters"),
        ("s3://tfmq/p?region=eu west", "The region of the store s3://tfmq/p is no name of a region: write one such"),
        ("s3://tfmq/a/../b", "a prefix has ASCII letters"),
        ("s3://tfmq/p?endpoint=127.0.0.1:9000", "The endpoint of the store s3://tfmq/p is no address: write https://"),
        ("s3://tfmq/p?endpoint=http://me:hunter2@host:9000", "The endpoint of the store s3://tfmq/p is no address"),
        ("s3://tfmq/p?endpoint=http://host:port", "is no address"),
        ("s3://tfmq/p?endpoint=", "is no address"),
        ("s3://tfmq/p?virtual_hosted_style_request=hunter3", "cannot be used: "),
        ("az://container/p", "cannot be used: .*Account must be specified"),
        ("gs://bucket/p?service_account=/proc/nowhere", "cannot be used: No such file or directory"),
    ],
)
def test_a_wrong_url_is_refused_without_its_secrets(
    url: str, sentence: str, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreRefused, match=sentence) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
def test_a_line_end_in_a_credential_is_refused(name: str, credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after reading it from a file. obstore would end the thread of the first request."""
    monkeypatch.setenv(name, "hunter2\n")
    with pytest.raises(StoreRefused, match=f"^{name} has a line end") as caught:
        open_store("s3://tfmq/p")
    assert "hunter2" not in str(caught.value)


def test_an_endpoint_comes_from_the_url_or_the_environment(
    s3: S3Server, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    store = open_store("s3://tfmq/endpoints")
    assert store.put_new("replica", b"1") and store.name == "s3://tfmq/endpoints"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert open_store(s3.url("endpoints")).get("replica") == b"1", "the URL comes first"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(StoreRefused, match="The AWS_ENDPOINT_URL of the store s3://tfmq/p is no address"):
        open_store("s3://tfmq/p")


def test_google_and_azure_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store("gs://bucket/p").name == "gs://bucket/p"
    assert open_store("az://container/p?account_name=mine").name == "az://container/p?account_name=mine"


class Answers(http.server.BaseHTTPRequestHandler):
    """Gives every request the same answer."""

    status = 200
    body = b""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def answers(credentials: None) -> Iterator[Callable[[int, bytes], Store]]:
    """Returns a store whose server answers each request so."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

        def answering(status: int, body: bytes) -> Store:
            Answers.status, Answers.body = status, body
            return open_store(f"s3://tfmq/p?endpoint=http://127.0.0.1:{server.server_port}")

        yield answering
        server.shutdown()


def error_body(code: str, message: str = "So\n  it is.") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "sentence"),
    [
        (500, error_body("InternalError"), StoreUnavailable, "failed at a put of entries/1: InternalError: So it is."),
        (503, error_body("SlowDown"), StoreUnavailable, "failed at a put of entries/1: SlowDown: So it is."),
        (507, b"", StoreUnavailable, "failed at a put of entries/1: status 507."),
        (429, b"", StoreUnavailable, "status 429"),
        (409, error_body("ConditionalRequestConflict"), StoreUnavailable, "ConditionalRequestConflict: So it is."),
        (403, error_body("RequestTimeTooSkewed"), StoreRefused, "refuses the time of this machine"),
        (400, error_body("ExpiredToken"), StoreRefused, "have expired (ExpiredToken: So it is): set AWS_ACCESS_KEY_ID"),
        (403, error_body("InvalidAccessKeyId"), StoreRefused, "refuses the credentials (InvalidAccessKeyId: So it is)"),
        (403, error_body("AccessDenied"), StoreRefused, "does not permit a put of entries/1 (AccessDenied: So it is)"),
        (403, error_body("NoIdea"), StoreRefused, "check that AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are right"),
        (403, b"", StoreRefused, "without a reason that tfmq knows (status 403): check that AWS_ACCESS_KEY_ID"),
        (401, b"", StoreRefused, "refuses the credentials (status 401)"),
        (404, b"<html>no such page</html>", StoreRefused, "refuses a put of entries/1: status 404."),
        (501, error_body("NotImplemented"), StoreUnavailable, "NotImplemented"),
        (301, error_body("PermanentRedirect"), StoreRefused, "incorrectly configured region."),
    ],
)
def test_what_a_server_answers_is_told(
    answers: Callable[[int, bytes], Store], status: int, body: bytes, kind: type[ReplicationError], sentence: str
) -> None:
    assert sentence in said_by(answers(status, body), CALLS[0], kind)


@pytest.mark.parametrize("service", ["machine", "role"])
def test_a_service_that_refuses_to_give_credentials_is_told_from_the_store(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    Answers.status, Answers.body = 403, error_body("AccessDenied")
    with https_server(authority) as endpoint:
        if service == "machine":
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", endpoint)
        else:
            (tmp_path / "token").write_text("token")
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/writer")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", endpoint)
        monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
        store = open_store("s3://tfmq/p?endpoint=http://127.0.0.1:1")
        for call in CALLS:
            text = said_by(store, call, StoreRefused)
            assert text.startswith("No credentials for the store") and "give the machine a role" in text, text


def test_only_a_store_that_says_so_has_no_object(answers: Callable[[int, bytes], Store]) -> None:
    """Not a web server that is there in its place."""
    said_by(answers(404, b"<html>no such page</html>"), CALLS[1], StoreRefused)
    assert answers(404, error_body("NoSuchKey")).get("entries/1") is None


def test_a_put_that_lost_is_told_from_a_put_that_failed(answers: Callable[[int, bytes], Store]) -> None:
    assert not answers(412, error_body("PreconditionFailed")).put_new("entries/1", b"")


def test_a_store_whose_lists_are_not_in_order_is_refused(answers: Callable[[int, bytes], Store]) -> None:
    listed = "".join(
        f"<Contents><Key>p/{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
        for key in ("entries/2", "entries/1")
    )
    store = answers(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>".encode())
    text = said_by(store, CALLS[2], StoreRefused)
    assert "does not list its objects in the order of their keys (entries/2, then entries/1)" in text


def test_a_server_that_stands_still_and_goes_on(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = open_store(s3_url)
    monkeypatch.setattr(object_store, "CALL_SECONDS", 1)
    store = open_store(s3_url)
    with s3.frozen():
        said_by(store, lambda store: store.put_new("entries/2", b"2"), StoreUnavailable)
    # The server may come to it still: the caller finds out by a get.
    assert patient.put_new("entries/2", b"2") or patient.get("entries/2") == b"2"
