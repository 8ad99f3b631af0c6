"""An S3 server of this machine, and a proxy before it that breaks what it is told to."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

START_S = 60
CHUNK_BYTES = 2**16

Fault = Literal["drop", "hang", "cut", "503", "403"]
"""Close the connection, never answer, close it after the first byte of an answer, or answer with a status."""
STATUS_LINES = {"503": "503 Slow Down", "403": "403 Forbidden"}
ERROR_CODES = {"503": "SlowDown", "403": "InvalidAccessKeyId"}


@contextmanager
def s3_server() -> Iterator[int]:
    """Runs moto's S3 in a process of its own; gives its port on 127.0.0.1."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with log.open("wb") as stream:
            server = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            yield _port_of(server, log)
        finally:
            server.terminate()
            server.wait()


def _port_of(server: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"moto did not start:\n{log.read_text()}")


class Proxy:
    """Passes HTTP requests on, each on a connection of its own, so that it sees the head of every one.

    Attributes:
        fault: called with each request's method, says what is done to it; None passes it on.
        requests: the methods of all requests so far.
        faults: how many of them were not passed on as they were.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.fault: Callable[[str], Fault | None] = lambda _: None
        self.requests: list[str] = []
        self.faults = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = threading.Event()
        self._accept()

    def refuse(self) -> None:
        """Refuse connections from now on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()

    def listen(self) -> None:
        """Take connections again."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept()

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):  # it refuses already
            self.refuse()

    def _accept(self) -> None:
        self._accepting = threading.Thread(target=self._serve, args=(self._listener,), daemon=True)
        self._accepting.start()

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with client, suppress(OSError):  # either side may go away at any time
            head, body = _read_head(client)
            if not head:
                return
            method = head.split(b" ", 1)[0].decode()
            self.requests.append(method)
            fault = self.fault(method)
            self.faults += fault is not None
            if fault == "hang":
                self._ended.wait()
            elif fault in STATUS_LINES:
                _answer(client, fault, method)
            elif fault != "drop":
                self._pass_on(client, head, body, cut=fault == "cut")

    def _pass_on(self, client: socket.socket, head: bytes, body: bytes, *, cut: bool) -> None:
        with socket.create_connection(("127.0.0.1", self._server_port)) as server:
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            answer_head, answer = _read_head(server)
            client.sendall(answer_head + b"\r\n\r\n" + answer[: 1 if cut else None])
            if not cut:
                _pump(server, client)
            client.shutdown(socket.SHUT_RDWR)  # to close it would wait for the thread that reads from it


def _read_head(stream: socket.socket) -> tuple[bytes, bytes]:
    """A message up to its empty line, and what came behind that."""
    content = b""
    while b"\r\n\r\n" not in content:
        piece = stream.recv(CHUNK_BYTES)
        if not piece:
            return b"", b""
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    return head, body


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(CHUNK_BYTES):
            target.sendall(piece)


def _answer(client: socket.socket, status: str, method: str) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{ERROR_CODES[status]}</Code><Message>told so</Message></Error>".encode()
    head = f"HTTP/1.1 {STATUS_LINES[status]}\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + (b"" if method == "HEAD" else body))
    client.shutdown(socket.SHUT_WR)
    while client.recv(CHUNK_BYTES):
        pass  # to close with unread content would reset the connection before the answer is read
