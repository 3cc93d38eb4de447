"""The live page's server: who is answered, how often data are made, and what a browser gets."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from hkv.errors import ConfigError
from hkv.page import live

made = list[int]()


@pytest.fixture
def served() -> Iterator[live.Live]:
    made.clear()

    def data() -> dict[str, Any]:
        made.append(1)
        return {"title": "x", "cases": [], "made": len(made)}

    with live.Live("127.0.0.1:0", "x", data) as server:
        yield server


def asked(server: live.Live, path: str, host: str = "") -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(server.host, timeout=10)
    connection.request("GET", path, headers={"Host": host or server.host})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers.get("X-HKV-Version")


def test_only_who_knows_the_token_is_answered(served: live.Live) -> None:
    base = urlsplit(served.url).path
    assert asked(served, base)[0] == 200
    assert asked(served, f"{base}data")[0] == 200
    for path in ("/", "/data", f"{base[:-2]}x/", f"{base}../etc/passwd", f"{base}page.js"):
        assert asked(served, path)[:2] == (404, b"")
    for host in ("example.org", f"localhost:{served.host.rpartition(':')[2]}", "127.0.0.1"):
        assert asked(served, base, host)[:2] == (403, b"")
    assert len(base) > 20


def test_data_are_made_when_somebody_looks_and_once_a_second(
    served: live.Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"{urlsplit(served.url).path}data"
    assert made == []
    first = asked(served, f"{data}?since=0")
    assert (first[0], first[2], len(made)) == (200, "1", 1)
    assert asked(served, f"{data}?since=1")[0] == 204
    assert asked(served, f"{data}?since=0")[1] == first[1]
    assert len(made) == 1
    monkeypatch.setattr(live, "SECONDS", 0.0)
    assert asked(served, f"{data}?since=1")[2] == "2"
    assert len(made) == 2


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "192.168.1.1:80", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":0"]
)
def test_addresses_that_others_could_reach_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="of this machine alone"):
        live.Live(address, "x", dict)
