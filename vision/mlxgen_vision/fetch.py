"""Fetching a picture or video by http(s) without letting the address reach into this machine or its network.

An address is looked up once, every answer is checked, and the connection is made to the very address that was checked:
a name that resolves differently a moment later gains nothing. Each redirect goes through the same checks. Proxies from
the environment are not used, since what they connect to can't be checked.
"""

from __future__ import annotations

import errno
import http.client
import io
import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_BLOCK_BYTES: Final = 64 * 1024
_POLL_S: Final = 0.1  # how long a stop can wait for the network
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_IPV6_INTERNET: Final = ipaddress.ip_network("2000::/3")
# Set aside by IANA, but "global" to some versions of `ipaddress`.
_SET_ASIDE: Final = tuple(
    ipaddress.ip_network(n) for n in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
)
_REDIRECTS: Final = (301, 302, 303, 307, 308)


def is_public(address: Address) -> bool:
    """Whether an address is out on the internet: not loopback, private, link-local, multicast, reserved, unspecified.

    IPv6 forms that carry an IPv4 address (mapped, 6to4, NAT64) are as public as the one they carry.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None:
            return is_public(address.sixtofour)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _IPV6_INTERNET:
            return False
    if any(address in network for network in _SET_ASIDE):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host name, as the system resolves it. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True)
class UrlPolicy:
    """Where a URL may lead. The default is what callers want; the two functions are for a test or a special network.

    `timeout_s` bounds the whole fetch, redirects included.
    """

    allows: Callable[[Address], bool] = is_public
    resolve: Callable[[str, int], list[str]] = resolve
    timeout_s: float = 60.0
    max_redirects: int = 5


def fetch(url: str, *, policy: UrlPolicy, max_bytes: int, cancel: CancelToken = NEVER) -> bytes:
    """The body behind a URL. A checkpoint comes before each hop, each wait of 0.1 s and each block of 64 KB.

    Raises `MediaError` for another scheme, an address the policy doesn't allow, a status other than 200, more than
    `max_bytes`, a body shorter than announced, too many redirects, or when time is up.
    """
    deadline = time.monotonic() + policy.timeout_s
    at = url
    for _ in range(policy.max_redirects + 1):
        cancel.checkpoint()
        body, location = _Hop(at, url, policy, deadline, cancel).get(max_bytes)
        if location is None:
            return body
        following = urljoin(at, location)
        if urlsplit(at).scheme == "https" and urlsplit(following).scheme == "http":
            raise MediaError(f"{url}: redirects from https to plain {following!r}; give that address if you mean it")
        at = following
    raise MediaError(f"{url}: more than {policy.max_redirects} redirects; give the final address")


class _Hop:
    """One request to one address. Owned by `fetch`; nothing survives it."""

    def __init__(self, url: str, asked: str, policy: UrlPolicy, deadline: float, cancel: CancelToken) -> None:
        self.url = url
        self.label = asked if url == asked else f"{asked} (redirected to {url})"
        self.policy = policy
        self.deadline = deadline
        self.cancel = cancel

    def wait(self) -> None:
        """The checkpoint of every short wait."""
        self.cancel.checkpoint()
        if time.monotonic() >= self.deadline:
            raise MediaError(f"{self.label}: no complete answer within {self.policy.timeout_s:g} s; download it first")

    def get(self, max_bytes: int) -> tuple[bytes, str | None]:
        """(body, None), or (b"", where to go instead)."""
        parts, host, port = self._parse()
        try:
            sock = self._connect(host, port)
        except OSError as error:
            raise MediaError(f"{self.label}: can't connect ({error}); check the address and the network") from error
        try:
            return self._exchange(parts, host, port, sock, max_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            what = str(error) or type(error).__name__
            raise MediaError(f"{self.label}: the transfer failed ({what}); try again or download it first") from error
        finally:
            sock.close()

    def _parse(self) -> tuple[SplitResult, str, int]:
        try:
            parts = urlsplit(self.url)
            port = parts.port
            host = parts.hostname or ""
            host = host if ":" in host else host.encode("idna").decode("ascii")
        except ValueError as error:
            raise MediaError(f"{self.label}: not a valid address ({error})") from error
        if parts.scheme not in ("http", "https"):
            raise MediaError(f"{self.label}: {parts.scheme or 'no'} scheme; only http and https addresses are fetched")
        if not host or any(c <= " " or c == "\x7f" for c in self.url):
            raise MediaError(f"{self.label}: not a valid address; it needs a host and no blanks")
        if parts.username is not None or parts.password is not None:
            raise MediaError(f"{self.url.split('@')[-1]}: addresses with a user name or password aren't fetched")
        return parts, host, port or (443 if parts.scheme == "https" else 80)

    def _resolve(self, host: str, port: int) -> list[str]:
        """Look the name up on the side, since the system's resolver can't be interrupted."""
        answer: list[list[str] | BaseException] = []

        def look_up() -> None:
            try:
                answer.append(self.policy.resolve(host, port))
            except (OSError, UnicodeError) as error:
                answer.append(error)

        thread = threading.Thread(target=look_up, name="mlxgen-resolve", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            if thread.is_alive():
                self.wait()
        found = answer[0] if answer else OSError("the look-up failed")
        if isinstance(found, BaseException):
            raise MediaError(f"{self.label}: can't find the host {host!r} ({found}); check the address") from found
        return found

    def _connect(self, host: str, port: int) -> socket.socket:
        addresses = self._resolve(host, port)
        if not addresses:
            raise MediaError(f"{self.label}: the host {host!r} has no address")
        for text in addresses:
            address = ipaddress.ip_address(text)
            if not self.policy.allows(address):
                raise MediaError(
                    f"{self.label}: {host!r} is {address}, an address inside this machine or a local network, which "
                    "is never fetched; download the file and give its path"
                )
        failure: OSError = OSError("no address answered")
        for text in addresses:
            family = socket.AF_INET6 if ":" in text else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._connect_to(sock, text, port)
                return sock
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    def _connect_to(self, sock: socket.socket, address: str, port: int) -> None:
        sock.setblocking(False)
        code = sock.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            raise OSError(code, f"{os.strerror(code)}: {address} port {port}")
        while not select.select([], [sock], [], _POLL_S)[1]:
            self.wait()
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, f"{os.strerror(code)}: {address} port {port}")

    def _exchange(
        self, parts: SplitResult, host: str, port: int, sock: socket.socket, max_bytes: int
    ) -> tuple[bytes, str | None]:
        plain = parts.scheme == "http"
        connection = http.client.HTTPConnection(host, port) if plain else http.client.HTTPSConnection(host, port)
        carrier = sock if plain else self._secure(sock, host)
        stream = _Stream(carrier, self.wait)
        connection.sock = stream  # so that http.client doesn't look the name up and connect by itself
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            target = "".join(c if c < "\x7f" else "".join(f"%{b:02X}" for b in c.encode()) for c in target)
            connection.request("GET", target, headers={"User-Agent": "mlxgen", "Accept-Encoding": "identity"})
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status in _REDIRECTS and location:
                return b"", location
            if response.status != 200:
                raise MediaError(f"{self.label}: the server answered {response.status} {response.reason}")
            return self._read(response, max_bytes), None
        finally:
            connection.close()
            carrier.close()

    def _secure(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        wrapped = ssl.create_default_context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        wrapped.settimeout(_POLL_S)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    return wrapped
                except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self.wait()
        except BaseException:
            wrapped.close()
            raise

    def _read(self, response: http.client.HTTPResponse, max_bytes: int) -> bytes:
        if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise MediaError(f"{self.label}: the server compresses its answer unasked; download it first")
        length = response.length
        if length is not None and length > max_bytes:
            raise MediaError(f"{self.label}: {length:,} bytes, more than the limit of {max_bytes:,}")
        body = bytearray()
        while block := response.read(_BLOCK_BYTES):
            body += block
            if len(body) > max_bytes:
                raise MediaError(f"{self.label}: more than the limit of {max_bytes:,} bytes")
            self.wait()
        if length is not None and len(body) < length:
            raise MediaError(f"{self.label}: ended after {len(body):,} of {length:,} bytes; try again")
        return bytes(body)


class _Stream(io.RawIOBase):
    """A connected socket as `http.client` uses one, whose every wait is short and followed by a checkpoint."""

    def __init__(self, sock: socket.socket, wait: Callable[[], None]) -> None:
        super().__init__()
        sock.settimeout(_POLL_S)
        self._sock = sock
        self._wait = wait

    def makefile(self, mode: str) -> io.BufferedReader:
        # The connection closes its socket as soon as the answer is a closing one, and reads on from this file.
        return io.BufferedReader(_Stream(self._sock, self._wait), _BLOCK_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                return self._sock.recv_into(buffer)
            except (TimeoutError, ssl.SSLWantReadError):
                self._wait()

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except (TimeoutError, ssl.SSLWantWriteError):
                self._wait()
