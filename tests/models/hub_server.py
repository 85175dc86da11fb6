"""The few endpoints of the Hugging Face Hub that a download uses, on 127.0.0.1, with the faults a network has."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass
class Request:
    method: str
    path: str
    range: str | None


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False


@dataclass
class HubServer:
    """`repos` by name. Faults apply to the bodies of large files:

    `block_delay_s` after every 64 kB; `stall_after` bytes the line goes dead (until the test ends); `drop_after`
    bytes the connection closes, `drops` times; `corrupt` flips a byte, so many times; `status` answers everything.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    block_delay_s: float = 0.0
    stall_after: int | None = None
    drop_after: int | None = None
    drops: int = 0
    corrupt: int = 0
    ignore_range: bool = False
    status: int | None = None

    def __post_init__(self) -> None:
        self.closing = threading.Event()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def add(self, name: str, folder: Path, **options: Any) -> None:
        self.repos[name] = Repo({path.name: path.read_bytes() for path in folder.iterdir()}, **options)

    def body_requests(self, filename: str) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and r.path.endswith("/" + filename)]

    def stop(self) -> None:
        if not self.closing.is_set():
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(Request(self.command, path, self.headers.get("Range")))
        if hub.status is not None:
            return self._send(hub.status, {}, b"")
        if match := re.fullmatch(r"/api/models/(.+?)/revision/(.+)", path):
            name, revision, filename = match[1], match[2], None
        elif match := re.fullmatch(r"/api/models/(.+)", path):
            name, revision, filename = match[1], "main", None
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            name, revision, filename = match[1], match[2], match[3]
        else:
            return self._fail(404, "RepoNotFound")
        repo = hub.repos.get(name)
        if repo is None:
            return self._fail(401, "RepoNotFound")  # so does the hub, not to tell private from missing
        if repo.gated:
            return self._fail(403, "GatedRepo")
        if revision not in ("main", COMMIT):
            return self._fail(404, "RevisionNotFound")
        if filename is None:
            return self._send_info(name, repo)
        if filename not in repo.files:
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": COMMIT})
        return self._send_file(filename, repo.files[filename])

    def _fail(self, status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        self._send(status, {**(headers or {}), **({"X-Error-Code": code} if code else {})}, b"{}")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_info(self, name: str, repo: Repo) -> None:
        siblings = []
        for filename, data in repo.files.items():
            entry: dict[str, Any] = {"rfilename": filename, "size": len(data), "blobId": _git_hash(data)}
            if filename.endswith(_LFS_SUFFIXES):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        info = {"_id": "1", "id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _send_file(self, filename: str, data: bytes) -> None:
        hub = self.server_hub
        lfs = filename.endswith(_LFS_SUFFIXES)
        etag = hashlib.sha256(data).hexdigest() if lfs else _git_hash(data)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and not hub.ignore_range:
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if not lfs or self.command == "HEAD":
            return self._send(status, headers | {"Content-Length": str(len(data) - start)}, data[start:])
        if hub.corrupt:
            hub.corrupt -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        try:
            self._stream(data, start)
        except OSError:  # the client left
            self.close_connection = True

    def _stream(self, data: bytes, start: int) -> None:
        hub, sent = self.server_hub, 0
        while start + sent < len(data):
            if hub.stall_after is not None and sent >= hub.stall_after:
                hub.closing.wait()
                self.close_connection = True
                return
            if hub.drops and hub.drop_after is not None and sent >= hub.drop_after:
                hub.drops -= 1
                self.close_connection = True
                return
            block = data[start + sent : start + sent + 65536]
            self.wfile.write(block)
            sent += len(block)
            time.sleep(hub.block_delay_s)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
