"""A hub on loopback: as much of the Hugging Face protocol as `huggingface_hub` uses to list and fetch model repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """Files by revision, and who may read them."""

    revisions: dict[str, Files]
    token: str | None = None
    """Needed to see that the repository exists at all."""
    gate: str | None = None
    """Needed to read files; the listing is public."""
    broken: dict[str, list[int]] = field(default_factory=dict)
    """By file, how many bytes its next answers send before the connection is cut; −1: status 500."""

    def commit(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit stands for."""
        names = {name: hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest() for name in self.revisions}
        return names.get(revision) or (revision if revision in names.values() else None)

    def files(self, commit: str) -> Files:
        """The files of a commit."""
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`; `requests` lists what was asked, as `METHOD path`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.refuse_all = 0
        """A status for every answer; 0: none."""

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Names of the files whose content was sent, sorted, each once."""
        found = {
            r.split("/resolve/")[1].split("/", 1)[1] for r in self.requests if r.startswith("GET ") and "/resolve/" in r
        }
        return sorted(found)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A hub that serves until the block ends."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        if self.server.refuse_all:
            self._error(self.server.refuse_all, "", "")
            return
        parts = path.split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._error(404, "", "no such page")

    def _repository(self, name: str, revision: str, *, files: bool) -> tuple[Repository, str] | None:
        """The repository and commit, if the caller may see them; else an answer has been sent."""
        repository = self.server.repositories.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.token is not None and given != repository.token):
            self._error(404 if given else 401, "RepoNotFound", "Repository not found")
            return None
        if files and repository.gate is not None and given != repository.gate:
            self._error(403 if given else 401, "GatedRepo", "Access to this model is restricted")
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def _api(self, name: str, rest: list[str]) -> None:
        revision = "/".join(rest[1:]) or "main"
        found = self._repository(name, revision, files=False)
        if found is None:
            return
        repository, commit = found
        files = repository.files(commit)
        if rest[:1] == ["tree"]:
            self._json([{"type": "file", "path": n, "oid": _etag(b), "size": len(b)} for n, b in files.items()])
        else:
            siblings = [{"rfilename": n, "size": len(b), "blobId": _etag(b)} for n, b in files.items()]
            self._json({"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def _file(self, name: str, revision: str, file: str) -> None:
        found = self._repository(name, revision, files=True)
        if found is None:
            return
        repository, commit = found
        content = repository.files(commit).get(file)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found", commit)
            return
        cuts = repository.broken.get(file, [])
        cut = cuts.pop(0) if cuts and self.command == "GET" else None
        if cut == -1:
            self._error(500, "", "Internal error")
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start:] if cut is None else content[start:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
