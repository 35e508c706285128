"""Objects in a bucket of an object store, through obstore: `s3://BUCKET/PREFIX`, `gs://...`, `az://CONTAINER/PREFIX`.

The condition of `put_new` is a header of the request: If-None-Match (S3, Azure) or x-goog-if-generation-match (Google).
Credentials come from the environment, never from the URL; docs/replication.md says from which variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from tfmq.replication.errors import InvalidObject, ReplicationError, StoreRefused, StoreUnavailable
from tfmq.replication.store import OBJECT_BYTES_MAX, StoredObject, check_key, check_size

CONNECT_SECONDS: Final = 5
CALL_SECONDS: Final = 30
PAGE: Final = 1000
REASON_CHARACTERS_MAX: Final = 300
"""What is shown of a store's answer."""
CREDENTIAL_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


class _Kind(NamedTuple):
    """A kind of object store. `parameters`: those that a URL may have, and how obstore calls them."""

    store: Callable[..., Any]
    parameters: Mapping[str, str]
    endpoint_variables: tuple[str, ...]
    credentials: str


KINDS: Final = {
    "s3": _Kind(
        S3Store,
        {
            "endpoint": "aws_endpoint_url_s3",
            "region": "region",
            "virtual_hosted_style_request": "virtual_hosted_style_request",
            "skip_signature": "skip_signature",
        },
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "gs": _Kind(GCSStore, {"service_account": "service_account"}, (), "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": _Kind(
        AzureStore,
        {"account_name": "account_name", "endpoint": "endpoint"},
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
}
"""By the scheme of the URL."""

NO_OBJECT: Final = frozenset({"NoSuchKey", "BlobNotFound"})
NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
WRONG_CREDENTIALS: Final = frozenset(
    {
        "AuthenticationFailed",
        "AuthenticationRequired",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidSecurity",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "Unauthorized",
    }
)
EXPIRED_CREDENTIALS: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
NO_RIGHTS: Final = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "InsufficientAccountPermissions",
    }
)
CONFLICTS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
"""Two requests for the same key at the same time, of which the store has let this one fail: repeat it."""
TRANSIENT: Final = frozenset({408, 409, 425, 429})

_IN_HOST: Final = re.compile(r"[A-Za-z0-9._$-]+")
"""A bucket, and a region: parts of the address of a request. obstore would end the process's thread for others."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]*)"')
_CERTIFICATE: Final = re.compile(r"InvalidCertificate\(\s*(\w+)")
_METADATA: Final = re.compile(
    r"/latest/(?:api/token|meta-data)|metadata/identity|metadata\.google|computeMetadata|//169\.254\.170\.23?/"
)
"""Addresses that tell machines in a cloud their credentials. They are asked if nothing else has any."""
_ROLE_REQUEST: Final = "Error performing POST"
"""Only the services of Amazon and Google that give credentials for a role get such requests, not the stores."""


class ObjectStore:
    """A `tfmq.replication.store.Store` in a bucket. Requests are not repeated here, because the callers repeat them."""

    def __init__(self, url: str) -> None:
        """Raises StoreRefused for an invalid URL, and for credentials that are incomplete. Sends nothing."""
        scheme, bucket, prefix, parameters = _parse(url)
        self._kind = KINDS[scheme]
        self._bucket = bucket
        self._prefix = prefix
        shown = "&".join(f"{name}={value}" for name, value in parameters.items())
        self._shown = f"{scheme}://{bucket}{'/' if prefix else ''}{prefix}{'?' if shown else ''}{shown}"
        variables = {name: os.environ[name] for name in self._kind.endpoint_variables if os.environ.get(name)}
        endpoint = _checked_endpoint(self._shown, parameters, variables)
        if "region" in self._kind.parameters:
            _check_region(self._shown, parameters.get("region"))
            _check_credentials()
        config = {self._kind.parameters[name]: value for name, value in parameters.items()}
        if scheme == "s3":
            # One DELETE for each object: not all stores have the request that deletes many.
            config |= {"conditional_put": "etag", "disable_bulk_delete": "true"}
        try:
            self._store = self._kind.store(
                bucket,
                prefix=prefix or None,
                config=config,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=CALL_SECONDS),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=CALL_SECONDS)},
            )
        except (BaseError, ValueError, OSError) as error:
            raise StoreRefused(
                f"The store {self._shown} cannot be used: {_reason(error)} (credentials are taken from"
                f" {self._kind.credentials})."
            ) from None

    @property
    def name(self) -> str:
        return self._shown

    def put_new(self, key: str, data: bytes) -> bool:
        check_key(key)
        check_size(key, len(data))
        with self._translated_errors(f"a put of {key}"):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if _Answer.of(error).code in CONFLICTS:
                    raise
                return False
        return True

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._translated_errors(f"a get of {key}"):
            try:
                found = obstore.get(self._store, key)
                if found.meta["size"] > OBJECT_BYTES_MAX:
                    raise InvalidObject(f"{key} in {self.name} has more than {OBJECT_BYTES_MAX} bytes")
                return found.bytes().to_bytes()
            except FileNotFoundError as error:
                # Only if the store says so: a missing bucket, or a server that is no store, must not look empty.
                if _Answer.of(error).code in NO_OBJECT:
                    return None
                raise

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        with self._translated_errors(f"a list of {prefix or 'its objects'}"):
            # obstore lists whole folders. Where the prefix ends in the middle of a name, the list begins before it.
            folder = prefix.rpartition("/")[0]
            before = max(after, prefix[:-1]) if prefix and not prefix.endswith("/") else after
            last = ""
            for page in obstore.list(self._store, folder or None, offset=before or None, chunk_size=PAGE):
                for each in page:
                    key = each["path"]
                    if key <= last:
                        raise StoreRefused(
                            f"The store {self.name} does not list its objects in the order of their keys ({last}, then"
                            f" {key}): use one that does."
                        )
                    last = key
                    if key.startswith(prefix) and key > after:
                        yield StoredObject(key, each["size"], each["last_modified"].timestamp())
                    elif key > prefix and not key.startswith(prefix):
                        return

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
        with self._translated_errors(f"a delete of {keys[0]}"):
            try:
                obstore.delete(self._store, list(keys))
            except FileNotFoundError as error:
                if _Answer.of(error).code not in NO_OBJECT:
                    raise

    def close(self) -> None:
        """Nothing: obstore closes connections that are idle."""

    @contextmanager
    def _translated_errors(self, request: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._to_store_error(error, request) from None

    def _to_store_error(self, error: Exception, request: str) -> ReplicationError:
        answer = _Answer.of(error)
        reason = _reason(error)
        if answer.status in (401, 403) and self._is_about_credentials(error):
            return StoreRefused(
                f"No credentials for the store {self.name}: the service that gives this machine some refuses"
                f" ({reason}); set {self._kind.credentials}, or give the machine a role that may use the store."
            )
        if answer.code in NO_BUCKET:
            return StoreRefused(f"The store {self.name} has no bucket {self._bucket!r}: create it, or correct the URL.")
        if answer.code in EXPIRED_CREDENTIALS:
            return StoreRefused(
                f"The credentials for the store {self.name} have expired ({reason}): set {self._kind.credentials} to"
                " valid ones, and start again."
            )
        if answer.status == 401 or answer.code in WRONG_CREDENTIALS or isinstance(error, UnauthenticatedError):
            return StoreRefused(
                f"The store {self.name} refuses the credentials ({reason}): set {self._kind.credentials} to those of a"
                " user who may read, write, list and delete there."
            )
        if answer.status == 403 and answer.code == "RequestTimeTooSkewed":
            return StoreRefused(f"The store {self.name} refuses the time of this machine ({reason}): set its clock.")
        is_forbidden = answer.status == 403 or isinstance(error, PermissionDeniedError)
        if is_forbidden and answer.code not in NO_RIGHTS:
            return StoreRefused(
                f"The store {self.name} refuses {request} without a reason that tfmq knows ({reason}): check that"
                f" {self._kind.credentials} are right and have not expired, and that their user may read, write, list"
                " and delete there."
            )
        if is_forbidden:
            return StoreRefused(
                f"The store {self.name} does not permit {request} ({reason}): give its user the rights to read, write,"
                " list and delete there."
            )
        if answer.status is not None and 300 <= answer.status < 500 and answer.status not in TRANSIENT:
            return StoreRefused(f"The store {self.name} refuses {request}: {reason}.")
        if answer.status is not None:
            return StoreUnavailable(f"The store {self.name} failed at {request}: {reason}.")
        if _METADATA.search(str(error)):
            return StoreUnavailable(
                f"No credentials for the store {self.name}: {self._kind.credentials} are not set, and this machine's"
                f" cloud gives none ({reason})."
            )
        if "redirect" in reason:
            return StoreRefused(f"The store {self.name} refuses {request}: {reason}.")
        return StoreUnavailable(f"The store {self.name} does not answer {request}: {reason}.")

    def _is_about_credentials(self, error: Exception) -> bool:
        """Return whether an error is about the service that gives a machine its credentials, not about the store."""
        text = _text(error)
        is_about_role = self._kind is not KINDS["az"] and _ROLE_REQUEST in text
        return is_about_role or _METADATA.search(text) is not None


class _Answer(NamedTuple):
    """What a store has answered: the HTTP status, None if there was no answer; the code in the body, "" without one."""

    status: int | None
    code: str

    @classmethod
    def of(cls, error: Exception) -> _Answer:
        text = _text(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        return cls(int(status[1]) if status else None, code[1] if code else "")


def _text(error: Exception) -> str:
    """Return the text of an error without the dump of the library's structures, which repeats it."""
    return str(error).partition("\n\nDebug source")[0]


def _reason(error: Exception) -> str:
    """Return the part of a sentence that says why a request failed, without addresses and keys."""
    text = _text(error)
    answer = _Answer.of(error)
    if answer.status is not None:
        message = _MESSAGE.search(text)
        said = ": ".join(part for part in (answer.code, message[1] if message else "") if part)
        reason = said or f"status {answer.status}"
    elif "TimedOut" in str(error):
        reason = f"no answer within {CALL_SECONDS} s"
    else:
        certificate, cause = _CERTIFICATE.search(str(error)), _CAUSE.search(str(error))
        if certificate:
            return f"its certificate is not trusted ({certificate[1]}); SSL_CERT_FILE can name the authority's"
        reason = cause[1] if cause else text.rpartition(" - ")[2].rpartition(" error: ")[2]
    return " ".join(reason.split())[:REASON_CHARACTERS_MAX].rstrip(".")


def _parse(url: str) -> tuple[str, str, str, dict[str, str]]:
    """Return scheme, bucket, prefix and parameters. Raises StoreRefused, whose text shows no parameter's value."""
    try:
        parts = urlsplit(url)
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreRefused("The URL of the object store cannot be read: write s3://BUCKET/PREFIX.") from None
    scheme, bucket, prefix = parts.scheme, parts.netloc, unquote(parts.path).strip("/")
    if "@" in bucket:
        raise StoreRefused(
            f"The URL of the store has credentials: set {KINDS[scheme].credentials} in the environment instead."
        )
    if not bucket or ":" in bucket or parts.fragment:
        raise StoreRefused(f"The URL of the object store names no bucket: write {scheme}://BUCKET/PREFIX.")
    if not _IN_HOST.fullmatch(bucket):
        raise StoreRefused(
            "The bucket in the URL of the object store has other characters than ASCII letters, digits, '-', '_', '.'"
            f" and '$': write {scheme}://BUCKET/PREFIX."
        )
    if prefix:
        try:
            check_key(prefix)
        except ValueError:
            raise StoreRefused(
                f"{scheme}://{bucket}: a prefix has ASCII letters, digits, '-' and '.' in names between '/', none of"
                " which begins with a '.'."
            ) from None
    for name in parameters:
        if name not in KINDS[scheme].parameters:
            raise StoreRefused(
                f"{scheme}://{bucket}/{prefix} knows no parameter {name[:40]!r}, only"
                f" {', '.join(KINDS[scheme].parameters)}; credentials belong into the environment."
            )
    return scheme, bucket, prefix, parameters


def _check_region(shown: str, region: str | None) -> None:
    """Raise StoreRefused if the region of the URL, or else of the environment, is none."""
    given = {"region": region} if region is not None else {name: os.environ.get(name) for name in REGION_VARIABLES}
    for name, value in given.items():
        if value and not _IN_HOST.fullmatch(value):
            raise StoreRefused(
                f"The {name} of the store {shown.partition('?')[0]} is no name of a region: write one such as"
                " eu-central-1."
            )


def _check_credentials() -> None:
    """Raise StoreRefused for a line end, as a file of a secret has it, which no header of a request may have."""
    for name in CREDENTIAL_VARIABLES:
        if any(character < " " for character in os.environ.get(name, "")):
            raise StoreRefused(f"{name} has a line end or another control character: remove it.")


def _checked_endpoint(shown: str, parameters: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Return the endpoint, "" for the default one. obstore would end the process's thread for one that is no URL."""
    for name, value in {
        **({"endpoint": parameters["endpoint"]} if "endpoint" in parameters else {}),
        **variables,
    }.items():
        try:
            parts = urlsplit(value)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_address = False
        if not is_address or "@" in parts.netloc or parts.query or parts.fragment or any(c <= " " for c in value):
            raise StoreRefused(
                f"The {name} of the store {shown.partition('?')[0]} is no address: write https://HOST:PORT."
            )
    return parameters.get("endpoint") or next(iter(variables.values()), "")
