"""The HTTP server on loopback: one thread a connection, kept alive."""

from __future__ import annotations

import email
import email.policy
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, RawIOBase
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.databricks.wire import (
    REFUSALS,
    WORKSPACE_ID,
    Answer,
    ApiError,
    Fault,
    Request,
    Wire,
    shown,
)

CHUNK = 1 << 20


class HttpServer(ThreadingHTTPServer):
    """Listens on a free port of loopback; `stop` ends every connection and waits for it."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, wire: Wire) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.wire = wire
        self._open: set[socket.socket] = set()
        self._serving = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._serving.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._open.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of ours; what is one, the wire has kept."""

    def stop(self) -> None:
        self.shutdown()
        self._serving.join()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        deadline = time.monotonic() + 5
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)


class Connection(BaseHTTPRequestHandler):
    """Every method takes the same way: record, disturb, act, answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the wire keeps the record."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=unquote(parts.path),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers=dict(self.headers.items()),
            stream=Body(self.rfile, self.headers),
        )
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request.origin = self.server.wire.tokens.get(token, "")
        fault = self.server.wire.record(request)
        try:
            self._respond(request, parts.path, fault)
        finally:
            request.ended = time.monotonic()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _respond(self, request: Request, path: str, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        if fault and kind == "slow":
            time.sleep(fault.seconds)
        if fault and kind == "cut":
            return self._cut(fault)
        answer = self._act(request, path, fault if kind in REFUSALS else None)
        if fault and kind == "lost":
            return self._cut(fault)
        request.status = answer.status
        self._send(request, answer, fault if kind == "torn" else None)

    def _act(self, request: Request, path: str, refusal: Fault | None) -> Answer:
        wire = self.server.wire
        try:
            if refusal:
                if int(request.headers.get("Content-Length") or 0) <= 8 * CHUNK:
                    _read(request)
                return _refused(refusal)
            # A signed address is its own authorization; discovery comes before any.
            if not path.startswith(("/signed/", "/.well-known/")):
                _authenticate(request)
            handler, groups, stream = wire.find(request.method, path)
            if not stream:
                _read(request)
            found = handler(request, *groups)
            return found if isinstance(found, Answer) else Answer({} if found is None else found)
        except ApiError as error:
            return Answer({"error_code": error.code, "message": error.message}, error.status)
        except ConnectionError:
            raise
        except Exception as error:
            wire.errors.append(error)
            return Answer({"error_code": "INTERNAL_ERROR", "message": f"stand-in: {error!r}"}, 500)

    def _send(self, request: Request, answer: Answer, torn: Fault | None) -> None:
        body, headers = answer.body, {"X-Databricks-Org-Id": WORKSPACE_ID, **answer.headers}
        if answer.length is None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        chunks: Iterator[bytes] = iter([body]) if isinstance(body, bytes) else iter(body)
        length = len(body) if isinstance(body, bytes) else answer.length or 0
        if answer.status != 204:
            headers.setdefault("Content-Length", str(length))
        # What nobody read would be taken for the next request.
        if not request.stream.drain():
            headers["Connection"] = "close"
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if torn:
            self.wfile.write(next(chunks, b"")[: length // 2])
            return self._cut(torn)
        for chunk in chunks:
            self.wfile.write(chunk)

    def _cut(self, fault: Fault) -> None:
        """End the connection with a reset, as a broken network does."""
        fault.then()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


class Body(RawIOBase):
    """A request's body: as long as it says, or in chunks."""

    def __init__(self, source: BufferedIOBase, headers: Any) -> None:
        self._source = source
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        self._left = int(headers.get("Content-Length") or 0)
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        if self._chunked and self._left == 0:
            self._left = int(self._source.readline().split(b";")[0] or b"0", 16)
            if self._left == 0:
                self._source.readline()
                self._chunked = False
                return b""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.read(wanted) if wanted else b""
        if len(data) < wanted:
            raise ConnectionResetError("the client went away")
        self._left -= len(data)
        self.taken += len(data)
        if self._chunked and self._left == 0:
            self._source.readline()
        return data

    def chunks(self) -> Iterator[bytes]:
        while data := self.read(CHUNK):
            yield data

    def drain(self, at_most: int = 64 * CHUNK) -> bool:
        """Read what is left; False when that is too much to be worth it."""
        if self._left > at_most:
            return False
        for _ in self.chunks():
            continue
        return True


def _authenticate(request: Request) -> None:
    if not request.origin:
        raise ApiError(
            401, "UNAUTHENTICATED", "Credential was not sent or is of an unsupported type"
        )


def _refused(fault: Fault) -> Answer:
    code, message = REFUSALS[fault.kind]
    headers = {"Retry-After": f"{fault.seconds:.0f}"} if fault.kind == "429" else {}
    return Answer({"error_code": code, "message": message}, int(fault.kind), headers)


def _read(request: Request) -> None:
    """The whole body, as the value it stands for."""
    request.raw = b"".join(request.stream.chunks())
    kind = request.headers.get("Content-Type", "")
    if not request.raw:
        return
    if kind.startswith("multipart/form-data"):
        request.form = _form(kind, request.raw)
        request.body = {name: shown(data) for name, data in request.form.items()}
    elif kind.startswith("application/octet-stream"):
        request.body = {"bytes": len(request.raw)}
    else:
        try:
            request.body = json.loads(request.raw)
        except ValueError:
            request.body = {"bytes": len(request.raw)}


def _form(kind: str, raw: bytes) -> dict[str, bytes]:
    head = f"Content-Type: {kind}\r\n\r\n".encode()
    message = email.message_from_bytes(head + raw, policy=email.policy.HTTP)
    found: dict[str, bytes] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        found[str(name)] = bytes(part.get_payload(decode=True) or b"")
    return found
