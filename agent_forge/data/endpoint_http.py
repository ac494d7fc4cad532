"""One HTTP exchange with an endpoint, bounded in bytes and seconds; no redirect is followed."""

import contextlib
import email.utils
import http.client
import ipaddress
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from agent_forge.config import strict_json
from agent_forge.errors import ConfigError, EndpointFailed

MAX_REPLY_BYTES = 8 << 20
MAX_SAID = 200  # characters of an endpoint's own words in an error
SECRET = 8  # characters that a key has at least, if it is to be kept secret
HIDDEN = "***"


class NotSent(Exception):
    """There is no connection, so nobody can have billed the request."""


class NotAnswered(Exception):
    """The request was sent, and no whole reply came."""


class Reply:
    """The status, headers and content of a reply."""

    def __init__(self, status: int, headers: http.client.HTTPMessage, content: bytes) -> None:
        self.status, self.headers, self.content = status, headers, content

    @property
    def is_too_large(self) -> bool:
        return len(self.content) > MAX_REPLY_BYTES

    @cached_property
    def data(self) -> Any:
        """The content as JSON; None if it is none."""
        with contextlib.suppress(ValueError):
            return None if self.is_too_large else strict_json.parse(self.content.decode())
        return None

    @property
    def _error(self) -> Any:
        return self.data.get("error") if isinstance(self.data, dict) else None

    @property
    def error_status(self) -> int:
        """The status; or, where a reply of status 200 holds an error, that of the error."""
        code = self._error.get("code") if isinstance(self._error, dict) else None
        if self.status == 200 and isinstance(code, int) and 400 <= code < 600:
            return code
        return self.status

    @property
    def is_passing(self) -> bool:
        """True if another try may do better."""
        return self.error_status in (408, 429) or self.error_status >= 500

    @property
    def is_unpaid(self) -> bool:
        """True if the endpoint refused the request: nothing was generated."""
        return 300 <= self.status < 500 and self.status != 408

    @property
    def said(self) -> str:
        """What the endpoint says of an error, or where it points to, as one plain line."""
        message = self._error.get("message") if isinstance(self._error, dict) else self._error
        text = str(message or self.headers.get("Location") or "").split("?")[0]
        return "".join(c if c.isprintable() else " " for c in text)

    @property
    def retry_after_s(self) -> float:
        """The seconds that the endpoint asks to wait; 0 if it does not."""
        text = self.headers.get("Retry-After") or "0"
        try:
            seconds = float(text)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, OverflowError):
                return 0.0
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0


class Address:
    """The address of an endpoint, and the rules for its key."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url.rstrip("/"))
            host, port = parts.hostname or "", parts.port
            host.encode("idna")
        except ValueError:  # whose text may repeat a secret
            raise ConfigError("the address of the endpoint cannot be read") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("the address of an endpoint begins with https:// (or http://)")
        if parts.username is not None or parts.query or parts.fragment:  # perhaps a secret
            raise ConfigError("the address of an endpoint has no user, query or fragment")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError("the address of an endpoint is plain ASCII without blanks")
        self.url, self._path, self._is_tls = parts.geturl(), parts.path, parts.scheme == "https"
        self._host, self._port, self._hidden = host, port, ""

    @property
    def is_local(self) -> bool:
        """True if the address is this machine."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self._host).is_loopback
        return self._host == "localhost"

    def key(self, variable: str) -> str:
        """Return the key in an environment variable, if it may be sent; "" if there is none."""
        key = os.environ.get(variable, "").strip()
        if key and not (self._is_tls or self.is_local):
            hint = f"use https://, or unset {variable} if it needs no key"
            raise ConfigError(f"{self.url} is plain http: everybody would see the key", hint=hint)
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{variable} is not a key: it has blanks or strange characters")
        self._hidden = key
        return key

    def without_key(self, text: str) -> str:
        """Return a text of the endpoint without the key, if it repeats that. What is shorter than
        any secret (`1`, for a server of one's own) may be part of an answer, and stays."""
        return text.replace(self._hidden, HIDDEN) if len(self._hidden) >= SECRET else text

    def exchange(self, path: str, body: bytes, variable: str, timeout_s: float) -> Reply:
        """Send a request (a POST if it has a body) and return the reply."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        headers = {"Accept": "application/json", "User-Agent": "agent-forge"}
        if key := self.key(variable):
            headers["Authorization"] = f"Bearer {key}"
        if body:
            headers["Content-Type"] = "application/json"
        with contextlib.closing(kind(self._host, self._port, timeout=timeout_s)) as connection:
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as error:
                problem = f"{self.url} cannot prove who it is ({error.verify_message})"
                raise EndpointFailed(problem, hint="nothing was sent to it") from error
            except OSError as error:
                raise NotSent(error.strerror or type(error).__name__) from error
            try:
                with _deadline(connection.sock, timeout_s) as late:
                    method = "POST" if body else "GET"
                    connection.request(method, self._path + path, body or None, headers)
                    return _read(connection.getresponse(), late)
            except (OSError, http.client.HTTPException) as error:
                is_late = late.is_set() or isinstance(error, TimeoutError)
                problem = f"in {timeout_s:g} s" if is_late else type(error).__name__
                raise NotAnswered(problem) from error


@contextlib.contextmanager
def _deadline(connected: socket.socket, timeout_s: float) -> Iterator[threading.Event]:
    """Cut a connection that is not done in time, and set what is yielded: the timeout of a socket
    is for silence, not for a trickle."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # below TLS, if there is any

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _read(response: http.client.HTTPResponse, late: threading.Event) -> Reply:
    """Return a reply with its content, but for what is beyond the limit."""
    content = response.read(MAX_REPLY_BYTES + 1)
    ends_by_closing = response.length is None and not response.chunked
    if len(content) <= MAX_REPLY_BYTES and (response.length or (ends_by_closing and late.is_set())):
        raise http.client.IncompleteRead(content)
    return Reply(response.status, response.headers, content)
