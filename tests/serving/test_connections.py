"""What connections may cost: heads, their time, bodies in all, and how many there are; names of the server."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.serving.server import PATIENCE_S, serving, wait_for
from tests.serving.test_workers import BODY

HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: models.example\r\n"


@pytest.fixture(scope="module")
def narrow(repository):
    """Return a server with narrow limits, which browsers reach by a name."""
    options = ("--request-timeout-s", "4", "--max-request-bytes", "100000", "--max-held-bytes", "150000")
    with serving(repository, *options, "--max-connections", "10", "--allow-host", "models.example") as server:
        yield server.wait_until_ready()


def connected(server):
    host, port = server.http.split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def rest_of(connection):
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_head_that_is_too_large_is_refused(narrow):
    with connected(narrow) as connection:
        connection.sendall(HEAD + b"x: " + b"a" * 70_000)
        assert rest_of(connection).startswith(b"HTTP/1.1 431 ")
    with connected(narrow) as connection:
        connection.sendall(HEAD + b"x: " + b"a" * 50_000 + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 2\r\n\r\n{}" + HEAD])
def test_head_that_does_not_come_to_an_end_is_given_up(sent, narrow):
    with connected(narrow) as connection:
        connection.sendall(sent)
        assert rest_of(connection).partition(b" ")[2][:4] in (b"", b"400 ")


def test_bodies_that_are_held_together_are_bounded(narrow):
    body = json.dumps(BODY).encode() + b" " * 90_000
    with connected(narrow) as stalled:
        stalled.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + body)
        error = "requests hold more than 150000 bytes, see `--max-held-bytes`; try again later"

        def is_refused():
            status, found, headers = narrow.ask("/v2/models/digits/infer", body)
            return (status, found, headers["retry-after"]) == (429, {"error": error}, "1")

        wait_for(is_refused, narrow)
    wait_for(lambda: narrow.ask("/v2/models/digits/infer", body)[0] == 200, narrow)


def test_connections_are_bounded(narrow):
    with contextlib.ExitStack() as opened:
        for _ in range(10):
            opened.enter_context(connected(narrow))
        wait_for(lambda: narrow.ask("/v2/health/live")[0] == 503, narrow)
    wait_for(lambda: narrow.ask("/v2/health/live")[0] == 200, narrow)


def test_name_that_is_allowed_is_one_of_the_server(narrow):
    for host in ("models.example", "models.example:80", narrow.http):
        headers = {"Host": host, "Origin": "https://models.example"}
        assert narrow.ask("/v2/models/digits/infer", BODY, headers)[0] == 200
    assert narrow.ask("/v2/health/live", headers={"Origin": "https://other.example"})[0] == 403
