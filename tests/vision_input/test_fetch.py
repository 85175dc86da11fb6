from __future__ import annotations

import http.server
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from mlxgen_vision.fetch import UrlPolicy, fetch, is_public
from mlxgen_vision.image import load_image
from mlxgen_vision.limits import MediaLimits
from vision_input.inputs import encoded, pattern

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import MediaOptions

PICTURE = pattern(9, 7)
DATA = encoded(PICTURE, "PNG")
LOOPBACK = UrlPolicy(allows=lambda address: str(address) == "127.0.0.1", timeout_s=5)
ALLOWED = MediaOptions(allow_urls=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Host")))  # type: ignore[attr-defined]
        route, _, argument = self.path.partition("?")
        if route == "/to":
            self.send_response(302)
            self.send_header("Location", argument)
            self.end_headers()
        elif route == "/loop":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.end_headers()
        elif route == "/missing":
            self.send_error(404)
        elif route == "/short":
            self._body(DATA[:50], len(DATA))
        elif route == "/big":
            self._body(b"", 10**9)
        elif route == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except OSError:
                pass
        elif route == "/stall":
            self._body(DATA[:50], len(DATA))
            time.sleep(3)
        elif route == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, len(DATA), 100):
                block = DATA[at : at + 100]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._body(DATA, len(DATA))

    protocol_version = "HTTP/1.1"

    def _body(self, data: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def get(url: str, policy: UrlPolicy = LOOPBACK, max_bytes: int = 10**6, **rest: Any) -> bytes:
    return fetch(url, policy=policy, max_bytes=max_bytes, **rest)


def test_off_by_default_and_the_message_names_the_option(server: Any) -> None:
    with pytest.raises(MediaError, match="allow_urls=True"):
        load_image(server.url, MediaOptions(), limits=MediaLimits(url_policy=LOOPBACK))
    assert server.requests == []


def test_when_allowed_a_picture_is_fetched(server: Any) -> None:
    loaded = load_image(server.url + "/p.png", ALLOWED, limits=MediaLimits(url_policy=LOOPBACK))
    assert (loaded.rgb == PICTURE).all()
    assert loaded.name == server.url + "/p.png"
    assert get(server.url + "/chunked") == DATA
    assert get(server.url + "/ü") == DATA
    assert server.requests[-1][0] == "/%C3%BC"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1", "2130706433"]
)
def test_nothing_inside_the_machine_with_the_default_policy(server: Any, host: str) -> None:
    with pytest.raises(MediaError):
        load_image(f"http://{host}:{server.server_port}/p.png", ALLOWED)
    assert server.requests == []


INNER = (
    (
        "127.0.0.1",
        "127.9.9.9",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
    )
    + (
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "239.255.255.250",
        "255.255.255.255",
        "192.0.0.8",
    )
    + (
        "198.18.0.1",
        "203.0.113.5",
        "240.0.0.1",
        "::",
        "::1",
        "fe80::1",
    )
    + (
        "fc00::1",
        "fd12::1",
        "ff02::1",
        "fec0::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
    )
    + (
        "::127.0.0.1",
        "2002:7f00:1::",
        "2002:c0a8:101::",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
    )
    + (
        "2001:0:1::1",
        "5f00::1",
        "3fff::1",
        "192.88.99.1",
        "2001:db8::1",
        "::ffff:169.254.169.254",
        "100::1",
    )
)


@pytest.mark.parametrize("address", INNER)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    policy = UrlPolicy(resolve=lambda host, port: [address])
    with pytest.raises(MediaError, match="never fetched"):
        get("http://pictures.example/p.png", policy)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_one_inner_address_among_public_ones_is_refused() -> None:
    policy = UrlPolicy(resolve=lambda host, port: ["8.8.8.8", "192.168.0.1"])
    with pytest.raises(MediaError, match=r"192\.168\.0\.1"):
        get("http://pictures.example/", policy)


def test_a_redirect_inside_is_refused(server: Any) -> None:
    hops = {"front.example": "127.0.0.1", "inner.example": "10.0.0.7"}
    policy = UrlPolicy(allows=LOOPBACK.allows, resolve=lambda host, port: [hops.get(host, host)])
    front = f"http://front.example:{server.server_port}"
    for target in (
        "http://inner.example/",
        "http://10.0.0.7/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
    ):
        with pytest.raises(MediaError, match="redirected to"):
            get(f"{front}/to?{target}", policy)
    for target in ("file:///etc/passwd", "ftp://front.example/"):
        with pytest.raises(MediaError, match="only http and https"):
            get(f"{front}/to?{target}", policy)
    assert get(f"{front}/to?/p.png", policy) == DATA
    assert get(f"{front}/to?{front}/to?/p.png", policy) == DATA
    with pytest.raises(MediaError, match="more than 5 redirects"):
        get(f"{front}/loop", policy)


def test_the_address_that_was_checked_is_the_one_connected_to(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []

    def rebinding(host: str, port: int) -> list[str]:
        answers.append(host)
        return ["127.0.0.1"] if len(answers) == 1 else ["10.0.0.1"]

    def forbidden(*args: Any, **rest: Any) -> Any:
        raise AssertionError("the name was looked up again")

    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    policy = UrlPolicy(allows=LOOPBACK.allows, resolve=rebinding)
    assert get(f"http://pictures.example:{server.server_port}/p.png", policy) == DATA
    assert answers == ["pictures.example"]
    assert server.requests == [("/p.png", f"pictures.example:{server.server_port}")]


def test_what_a_server_can_do_wrong(server: Any) -> None:
    for path, said in (("/missing", "404"), ("/short", "ended after 50"), ("/big", "more than the limit")):
        with pytest.raises(MediaError, match=said):
            get(server.url + path)
    with pytest.raises(MediaError, match="more than the limit of 1,000,000"):
        get(server.url + "/endless")
    slow = UrlPolicy(allows=LOOPBACK.allows, timeout_s=0.3)
    with pytest.raises(MediaError, match=r"within 0\.3 s"):
        get(server.url + "/stall", slow)


def test_a_stop_does_not_wait_for_the_network(server: Any) -> None:
    token = CancelToken.after(0.2)
    started = time.monotonic()
    with pytest.raises(Cancelled):
        get(server.url + "/stall", cancel=token)
    assert time.monotonic() - started < 1.0

    def slow_resolver(host: str, port: int) -> list[str]:
        time.sleep(2)
        return ["127.0.0.1"]

    started = time.monotonic()
    with pytest.raises(Cancelled):
        get("http://x.example/", UrlPolicy(resolve=slow_resolver), cancel=CancelToken.after(0.1))
    assert time.monotonic() - started < 1.0


def test_addresses_that_are_no_addresses() -> None:
    for url in (
        "http://",
        "http://user:secret@8.8.8.8/",
        "http://8.8.8.8:99999/",
        "http://a b/",
        "http://[::1",
        "http://./",
    ):
        with pytest.raises(MediaError) as caught:
            get(url, UrlPolicy(resolve=lambda host, port: []))
        assert "secret" not in str(caught.value)


def test_a_closed_port_and_an_unknown_host() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(MediaError, match="can't connect"):
        get(f"http://127.0.0.1:{port}/")

    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror(8, "not known")

    with pytest.raises(MediaError, match="can't find the host"):
        get("http://nowhere.example/", UrlPolicy(resolve=unknown))
