"""The Files API below /Volumes and /Models: whole files, parts, ranges, folders."""

from __future__ import annotations

import email.utils
import os
import secrets
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from tests.databricks.connection import CHUNK
from tests.databricks.state import Rules, State
from tests.databricks.wire import Answer, ApiError, Request, Wire, invalid

_EXPIRED = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"


@dataclass
class Upload:
    """An upload in parts that is not complete; its parts are files of their own."""

    path: str
    overwrite: bool
    folder: Path
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Part number to its tag and size in bytes."""


class Files:
    """Real folders: `volumes` is what /Volumes is, `models` what /Models is."""

    def __init__(self, wire: Wire, state: State, rules: Rules, volumes: Path, models: Path) -> None:
        self.state, self.rules = state, rules
        self.roots = {"Volumes": volumes, "Models": models}
        self.url = ""
        self.uploads: dict[str, Upload] = {}
        self._parts = Path(tempfile.mkdtemp(prefix="parts-", dir=volumes.parent))
        self._lock = threading.Lock()
        files, folders = r"/api/2.0/fs/files(/.+)", r"/api/2.0/fs/directories(/.+?)/?"
        wire.route("PUT", files, self._put, stream=True)
        wire.route("GET", files, self._get)
        wire.route("HEAD", files, self._get)
        wire.route("DELETE", files, self._delete)
        wire.route("POST", files, self._post)
        wire.route("PUT", folders, self._make_folder)
        wire.route("HEAD", folders, self._folder_metadata)
        wire.route("GET", folders, self._list)
        wire.route("DELETE", folders, self._delete_folder)
        wire.route("POST", "/api/2.0/fs/create-upload-part-urls", self._part_urls)
        wire.route("POST", "/api/2.0/fs/create-download-url", self._download_url)
        wire.route("POST", "/api/2.0/fs/create-upload-url", self._upload_url)
        wire.route("PUT", r"/signed/part/(\d+)/(\w+)/(\d+)", self._signed_part, stream=True)
        wire.route("GET", r"/signed/file/(\d+)(/.+)", self._signed_get)
        wire.route("PUT", r"/signed/file/(\d+)(/.+)", self._signed_put, stream=True)

    def real(self, name: str) -> Path:
        """The real path of /Volumes/catalog/schema/volume/… or /Models/…; raises ApiError."""
        parts = name.strip("/").split("/")
        if parts[0] not in self.roots or ".." in parts or len(parts) < 4:
            raise invalid(f"Invalid path: {name}")
        if parts[0] == "Volumes" and ".".join(parts[1:4]) not in self.state.volumes:
            raise ApiError(404, "NOT_FOUND", f"Volume '{'.'.join(parts[1:4])}' does not exist.")
        if parts[0] == "Models" and not self.roots["Models"].joinpath(*parts[1:5]).is_dir():
            raise ApiError(404, "NOT_FOUND", f"Model version '{name}' does not exist.")
        self._allowed(parts)
        return self.roots[parts[0]].joinpath(*parts[1:])

    def _allowed(self, parts: list[str]) -> None:
        full = ".".join(parts[1:4])
        if parts[0] == "Volumes" and ("READ_VOLUME", full) in self.state.denied:
            message = f"User does not have READ VOLUME on Volume '{full}'."
            raise ApiError(403, "PERMISSION_DENIED", message)

    def _to_write(self, name: str, overwrite: bool) -> Path:
        path = self.real(name)
        full = ".".join(name.strip("/").split("/")[1:4])
        if ("WRITE_VOLUME", full) in self.state.denied:
            message = f"User does not have WRITE VOLUME on Volume '{full}'."
            raise ApiError(403, "PERMISSION_DENIED", message)
        if path.is_dir() or any(place.is_file() for place in path.parents):
            raise ApiError(409, "ALREADY_EXISTS", f"{name} is a directory, or its parent a file.")
        if path.exists() and not overwrite:
            raise ApiError(409, "ALREADY_EXISTS", "The file being created already exists.")
        return path

    def _file(self, name: str) -> Path:
        path = self.real(name)
        if not path.is_file():
            raise ApiError(404, "NOT_FOUND", f"The file being accessed is not found: {name}")
        return path

    def _put(self, request: Request, name: str) -> Answer:
        if "part_number" in request.query:
            token, number = request.need("session_token"), request.number("part_number", 0)
            return self._take_part(request, token, number)
        path = self._to_write(name, request.true("overwrite", True))
        size = int(request.headers.get("Content-Length") or 0)
        if size > self.rules.max_put_bytes:
            message = f"The file is larger than {self.rules.max_put_bytes} bytes"
            raise ApiError(413, "INVALID_PARAMETER_VALUE", message)
        request.body = {"bytes": size}
        _replace(path, request.stream.chunks())
        return Answer(b"", 204)

    def _get(self, request: Request, name: str) -> Answer:
        path = self._file(name)
        facts = path.stat()
        headers = {
            "Content-Type": "application/octet-stream",
            "Last-Modified": email.utils.formatdate(facts.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if (limit := request.headers.get("If-Unmodified-Since")) and _later(facts.st_mtime, limit):
            raise ApiError(412, "FAILED_PRECONDITION", "The file was modified")
        start, end, status = _range(request.headers.get("Range"), facts.st_size)
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{facts.st_size}"
        return Answer(_read(path, start, end), status, headers, length=end - start)

    def _delete(self, request: Request, name: str) -> Answer:
        self._to_write(name, True)
        self._file(name).unlink()
        return Answer(b"", 204)

    def _make_folder(self, request: Request, name: str) -> Answer:
        path = self.real(name)
        if any(place.is_file() for place in (path, *path.parents)):
            raise ApiError(409, "ALREADY_EXISTS", f"{name} or its parent is a file")
        path.mkdir(parents=True, exist_ok=True)
        return Answer(b"", 204)

    def _folder(self, name: str) -> Path:
        path = self.real(name)
        if not path.is_dir():
            raise ApiError(404, "NOT_FOUND", f"The directory being accessed is not found: {name}")
        return path

    def _folder_metadata(self, request: Request, name: str) -> Answer:
        self._folder(name)
        return Answer(b"", 200)

    def _delete_folder(self, request: Request, name: str) -> Answer:
        path = self._folder(name)
        if any(path.iterdir()):
            raise ApiError(400, "DIRECTORY_NOT_EMPTY", f"The directory is not empty: {name}")
        path.rmdir()
        return Answer(b"", 204)

    def _list(self, request: Request, name: str) -> dict[str, Any]:
        size = min(request.number("page_size", self.rules.page_size) or 1, self.rules.page_size)
        start, oldest = request.number("page_token", 0), time.time() - self.rules.listing_lag_s
        found = []
        for path in sorted(self._folder(name).iterdir()):
            facts = path.stat()
            if path.is_file() and facts.st_mtime > oldest:
                continue
            entry = {"name": path.name, "path": f"{name}/{path.name}",
                     "is_directory": path.is_dir()}  # fmt: skip
            if path.is_file():
                entry |= {"file_size": facts.st_size, "last_modified": int(facts.st_mtime * 1000)}
            found.append(entry)
        # An empty page is answered without the field.
        answer: dict[str, Any] = {}
        if page := found[start : start + size]:
            answer["contents"] = page
        if start + size < len(found):
            answer["next_page_token"] = str(start + size)
        return answer

    def _post(self, request: Request, name: str) -> dict[str, Any]:
        action = request.need("action")
        if not self.rules.multipart:
            raise ApiError(404, "ENDPOINT_NOT_FOUND", "Multipart uploads are not enabled")
        if action == "initiate-upload":
            overwrite = request.true("overwrite", True)
            self._to_write(name, overwrite)
            token = secrets.token_hex(16)
            folder = self._parts / token
            folder.mkdir()
            self.uploads[token] = Upload(name, overwrite, folder)
            return {"multipart_upload": {"session_token": token}}
        token = request.need("session_token")
        upload = self._upload(token)
        if action == "complete-upload":
            self._complete(upload, request.body["parts"])
        with self._lock:
            self.uploads.pop(token, None)
        shutil.rmtree(upload.folder, ignore_errors=True)
        return {}

    def _upload(self, token: str) -> Upload:
        if token not in self.uploads:
            raise ApiError(404, "NOT_FOUND", "The upload session does not exist")
        return self.uploads[token]

    def _take_part(self, request: Request, token: str, number: int) -> Answer:
        upload = self._upload(token)
        if number < 1:
            raise invalid("part_number counts from 1")
        checksum, size, path = 0, 0, upload.folder / str(number)
        with tempfile.NamedTemporaryFile(dir=upload.folder, delete=False) as file:
            for chunk in request.stream.chunks():
                checksum = zlib.crc32(chunk, checksum)
                size += file.write(chunk)
        os.replace(file.name, path)
        upload.parts[number] = (f"{checksum:08x}", size)
        request.body = {"bytes": size}
        return Answer(b"", 200, {"ETag": f"{checksum:08x}"})

    def _complete(self, upload: Upload, parts: list[dict[str, Any]]) -> None:
        numbers = [part["part_number"] for part in parts]
        if not numbers or numbers != sorted(set(numbers)):
            raise invalid("parts are missing, doubled or not in order")
        for part in parts:
            tag, size = upload.parts.get(part["part_number"], ("", 0))
            if part["etag"].strip('"') != tag or not tag:
                raise invalid(f"part {part['part_number']} is not what was uploaded")
            if size < self.rules.min_part_bytes and part is not parts[-1]:
                raise invalid(f"part {part['part_number']} is smaller than the allowed minimum")
        target = self._to_write(upload.path, upload.overwrite)
        _join([upload.folder / str(number) for number in numbers], target)

    def _part_urls(self, request: Request) -> dict[str, Any]:
        token, until = request.need("session_token"), self._until()
        self._upload(token)
        first, number = request.need("start_part_number"), request.need("count")
        urls = [{"part_number": part, "url": f"{self.url}/signed/part/{until}/{token}/{part}",
                 "headers": []} for part in range(first, first + number)]  # fmt: skip
        return {"upload_part_urls": urls}

    def _download_url(self, request: Request) -> dict[str, Any]:
        name = request.need("path")
        self._file(name)
        return {"url": f"{self.url}/signed/file/{self._until()}{quote(name)}", "headers": []}

    def _upload_url(self, request: Request) -> dict[str, Any]:
        name = request.need("path")
        self._to_write(name, True)
        return {"url": f"{self.url}/signed/file/{self._until()}{quote(name)}", "headers": []}

    def _until(self) -> int:
        return int((time.time() + self.rules.signed_url_s) * 1000)

    def _signed_part(self, request: Request, until: str, token: str, number: str) -> Answer:
        return _expired(until) or self._take_part(request, token, int(number))

    def _signed_get(self, request: Request, until: str, name: str) -> Answer:
        return _expired(until) or self._get(request, name)

    def _signed_put(self, request: Request, until: str, name: str) -> Answer:
        return _expired(until) or self._put(request, name)


def _expired(until: str) -> Answer | None:
    if time.time() * 1000 <= int(until):
        return None
    return Answer(_EXPIRED, 403, {"Content-Type": "application/xml"})


def _join(parts: list[Path], target: Path) -> None:
    """One file of all parts, by the kernel: a store that has the parts does not send them again."""
    whole = parts[0].with_name("whole")
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while os.sendfile(file.fileno(), source.fileno(), None, 1 << 30):
                    continue
    target.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(whole, 0o644)
    os.replace(whole, target)


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    """A file appears whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Outside the volume, so that no listing shows a file that is not there yet.
    staging: BinaryIO
    descriptor, name = tempfile.mkstemp(prefix="upload-", dir=_staging(path))
    try:
        with os.fdopen(descriptor, "wb") as staging:
            for chunk in chunks:
                staging.write(chunk)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _staging(path: Path) -> Path:
    """The folder above /Volumes or /Models."""
    return next(place for place in path.parents if place.name in ("Volumes", "Models")).parent


def _read(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        left = (path.stat().st_size if end is None else end) - start
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk


def _range(header: str | None, size: int) -> tuple[int, int, int]:
    """Start, end (exclusive) and status of one byte range; the whole file without one."""
    if not header or not header.startswith("bytes=") or "," in header:
        return 0, size, 200
    first, _, last = header.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= size or start >= end:
        raise ApiError(416, "INVALID_RANGE", f"{header} is not within {size} bytes")
    return start, end, 206


def _later(mtime: float, limit: str) -> bool:
    return int(mtime) > email.utils.parsedate_to_datetime(limit).timestamp()
