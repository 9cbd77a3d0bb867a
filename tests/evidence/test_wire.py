"""Rates of links, on real sockets."""

import socket
import sys
from collections.abc import Iterator

import pytest

from scripts.cpu_pretraining import wire

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's option")


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        with client, served:
            yield client, served


def _rate(of: socket.socket) -> int:
    return int.from_bytes(of.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)


def test_only_connected_sockets_are_paced(
    connection,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socketpair()[0]:
        assert wire.pace(6e9) == ""
        rates = [_rate(end) for end in (*connection, listening)]
    assert rates == [6_000_000_000, 6_000_000_000, wire.UNLIMITED]
    congestion = connection[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert congestion.rstrip(b"\0") == b"reno"
    wire.pace(None)
    assert [_rate(end) for end in connection] == [wire.UNLIMITED] * 2
    connection[0].sendall(b"x")
    assert connection[1].recv(1) == b"x"


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (socket, "TCP_CONGESTION", 9999, "the kernel refuses"),
        (wire, "_SO_MAX_PACING_RATE", socket.SO_RCVLOWAT, "the kernel took a pacing rate of"),
        (sys, "platform", "darwin", "darwin lists no connected TCP socket"),
        (wire, "connected_sockets", list, "linux lists no connected TCP socket"),
    ],
)  # fmt: skip
def test_why_there_is_no_pacing_is_told(connection, monkeypatch, owner, name, value, said) -> None:
    monkeypatch.setattr(owner, name, value)
    assert said in wire.pace(2**40)
