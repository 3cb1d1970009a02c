"""What the first process of a server does before there are workers."""

import socket

import pytest

from aotexport_runtime.server.supervisor import bound


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_at_once(host):
    with bound(host, 0, shared=False) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()[:2]), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
