"""A page of what still goes on, for browsers on this machine alone.

Nothing is pushed: an update is made when a browser asks for one, at most once a second. The address holds
a token, so that other users of the machine, and pages of other sites, cannot guess it; a request under another host's
name is refused.
"""

from __future__ import annotations

import http.server
import ipaddress
import secrets
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hkv.errors import ConfigError
from hkv.page import packed, page

MOST = 5_000
"""Operations that a live page shows, so that memory and the time for an update are bounded."""

SECONDS = 1.0
"""Seconds between two updates, at least."""


class Live:
    """A server of one page, in threads of its own.

    Args:
      address: `HOST:PORT`, a loopback address.
      title: title of the page.
      data: data of the page as things are now (`hkv.page`), called when somebody looks.

    Attributes:
      url: address of the page, with its token.

    Raises:
      ConfigError: no such address on this machine, or one that others could reach.
    """

    def __init__(self, address: str, title: str, data: Callable[[], dict[str, Any]]) -> None:
        host, port = loopback(address)
        self._title, self._data = title, data
        self._lock = threading.Lock()
        self._made, self._version, self._packed = 0.0, 0, b""
        token = secrets.token_urlsafe(18)
        served = type("Served", (_Served,), {"live": self, "base": f"/{token}/"})
        try:
            self._server = _Server((host, port), served)
        except OSError as error:
            raise ConfigError("serve", address, f"an address that can be listened on ({error.strerror})") from error
        self._server.daemon_threads = True
        self.host = f"{host}:{self._server.server_address[1]}"
        self.url = f"http://{self.host}/{token}/"

    def __enter__(self) -> Live:
        threading.Thread(target=self._server.serve_forever, name="hkv-live", daemon=True).start()
        print(f"live page: {self.url}", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self) -> None:
        """Serves until the command is interrupted."""
        print("the page is served until you press Ctrl-C", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600)

    def let_go(self) -> None:
        """Leaves the address to the parent, in a forked process, which has none of the threads."""
        self._server.socket.close()

    def document(self) -> bytes:
        """The page, which then asks for its data."""
        return page(self._title, {"title": self._title, "cases": [], "live": True}, live="data")

    def update(self, known: int) -> tuple[int, bytes]:
        """Number of the newest data and the data, packed; nothing where they are known, or no second has gone by."""
        with self._lock:
            now = time.monotonic()
            if not self._packed or now - self._made >= SECONDS:
                found = packed(self._data())
                if found != self._packed:
                    self._packed, self._version = found, self._version + 1
                self._made = time.monotonic()
            return self._version, b"" if known == self._version else self._packed


class _Server(http.server.ThreadingHTTPServer):
    """A server that takes it as it comes when a browser goes away."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Served(http.server.BaseHTTPRequestHandler):
    """Answers the page and its data under the token, and nothing else."""

    live: Live
    base: str

    def do_GET(self) -> None:
        if self.headers.get("Host") != self.live.host:
            self._answer(403, "text/plain", b"")
            return
        path, _, query = self.path.partition("?")
        if secrets.compare_digest(path.encode(), self.base.encode()):
            self._answer(200, "text/html; charset=utf-8", self.live.document())
        elif secrets.compare_digest(path.encode(), f"{self.base}data".encode()):
            known = query.removeprefix("since=")
            version, found = self.live.update(int(known) if known.isdecimal() and len(known) < 10 else 0)
            self._answer(200 if found else 204, "application/octet-stream", found, version)
        else:
            self._answer(404, "text/plain", b"")

    def _answer(self, status: int, kind: str, content: bytes, version: int = 0) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "X-HKV-Version": str(version)}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing on standard error."""


def loopback(address: str) -> tuple[str, int]:
    """Host and port of an address of this machine alone; else ConfigError."""
    host, _, port = address.rpartition(":")
    expected = "HOST:PORT of this machine alone, such as 127.0.0.1:0"
    try:
        local = host == "localhost" or ipaddress.ip_address(host) in ipaddress.ip_network("127.0.0.0/8")
    except ValueError:
        local = False
    if not local or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("serve", address, expected)
    return host, int(port)
