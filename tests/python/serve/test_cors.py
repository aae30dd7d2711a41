"""Pages of other origins: nothing for them unless ``--cors`` names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Running, running, tiny_options

import llamatap as lt
from llamatap.serve import ServerOptions

ORIGIN = "https://notes.example.org"
OTHERS = (
    "https://example.org",
    "http://notes.example.org",
    "https://notes.example.org:8443",
    "https://notes.example.org.evil.com",
    "null",
)
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
BODY = {"model": "tiny", "input": "a"}
ALLOWED = "access-control-allow-origin"


def preflight(server: Running, origin: str, **headers: str) -> httpx.Response:
    return httpx.options(f"{server.url}/v1/hidden_states", headers={"Origin": origin, **ASKS, **headers})


def post(server: Running, origin: str, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/hidden_states", json=BODY, headers={"Origin": origin, **headers})


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_path)], ServerOptions(cors=(ORIGIN, "http://localhost:3000"))) as found:
        yield found


@pytest.mark.parametrize("origin", [ORIGIN, "http://localhost:3000"])
def test_a_page_that_is_named_reads(server: Running, origin: str) -> None:
    asked = preflight(server, origin)
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == origin
    assert {"GET", "POST"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    assert "content-type" in asked.headers["access-control-allow-headers"].lower()
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    # No credentials: cookies play no role.
    assert "access-control-allow-credentials" not in asked.headers
    found = post(server, origin)
    assert (found.status_code, found.headers[ALLOWED]) == (200, origin)
    assert "Origin" in found.headers["vary"]
    # Pages may read errors as well, and Retry-After.
    wrong = httpx.post(f"{server.url}/v1/completions", json={}, headers={"Origin": origin})
    assert (wrong.status_code, wrong.headers[ALLOWED]) == (400, origin)
    assert "Retry-After" in wrong.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", OTHERS)
def test_other_pages_do_not(server: Running, origin: str) -> None:
    refused = preflight(server, origin)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cors_refused")
    assert "origin" in refused.json()["error"]["message"]
    assert "Origin" in refused.headers["vary"]
    for response in (preflight(server, origin), post(server, origin)):
        assert ALLOWED not in response.headers


def test_a_stream(server: Running) -> None:
    body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 2}
    found = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Origin": ORIGIN})
    assert found.headers[ALLOWED] == ORIGIN
    assert found.text.endswith("data: [DONE]\n\n")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("origin", [ORIGIN, *OTHERS])
def test_without_the_option_nobody_does(origin: str, tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)]) as server:
        assert preflight(server, origin).status_code == 405
        for response in (preflight(server, origin), post(server, origin)):
            assert not [name for name in response.headers if name.startswith("access-control")]


def test_with_a_key(tiny_path: Path) -> None:
    """The browser's preflight comes without the key; the page sends it, or reads the refusal."""
    with running([tiny_options(tiny_path)], ServerOptions(api_key="sesame", cors=(ORIGIN,))) as server:
        assert preflight(server, ORIGIN).status_code == 200
        found = post(server, ORIGIN, Authorization="Bearer sesame")
        assert (found.status_code, found.headers[ALLOWED]) == (200, ORIGIN)
        refused = post(server, ORIGIN)
        assert (refused.status_code, refused.headers[ALLOWED]) == (401, ORIGIN)
        assert ALLOWED not in post(server, OTHERS[0], Authorization="Bearer sesame").headers


def test_all_of_them(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(cors=("*",))) as server:
        for origin in (ORIGIN, *OTHERS):
            assert preflight(server, origin).status_code == 200
            assert post(server, origin).headers[ALLOWED] == "*"
        # DNS rebinding is still refused.
        assert post(server, ORIGIN, Host="evil.com").status_code == 403


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://Example.org", "https://example.org"),
        ("https://example.org/", "https://example.org"),
        ("https://example.org:443", "https://example.org"),
        ("http://example.org:80", "http://example.org"),
        ("https://example.org:80", "https://example.org:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "*"),
    ],
)
def test_origins_are_written_as_browsers_write_them(given: str, origin: str) -> None:
    assert ServerOptions(cors=(given,)).cors == (origin,)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "example.org",
        "example.org:3000",
        "null",
        "https://",
        "https://example.org/page",
        "https://example.org?a",
        "https://example.org#a",
        "https://me@example.org",
        "https://*.example.org/*",
        "https://*.example.org",
        "https://example.org:port",
        "https://exämple.org",
        "https://example.org, https://other.org",
        "https://[::1",
    ],
)
def test_what_is_no_origin_is_refused(
    given: str, tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such an origin would never match a page's, silently."""
    wrong: Any = (ORIGIN, given)
    with pytest.raises(lt.InvalidInputError, match="an origin"):
        ServerOptions(cors=wrong)
    from llamatap.__main__ import main

    assert main(["serve", "--model", str(tiny_path), "--cors", ORIGIN, f"--cors={given}"]) != 0
    assert "an origin" in capsys.readouterr().err
