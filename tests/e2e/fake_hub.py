"""A small Hugging Face Hub on this machine: what huggingface_hub asks it to download a snapshot or upload a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by `models/ORG/NAME` or `datasets/ORG/NAME`: the content of each file, or the code of an error.

    Attributes:
        asked: paths of all requests.
        pushed: files of the last commit, by name.
    """

    repos: dict[str, dict[str, bytes] | tuple[int, str]]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    pushed: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            self._about("/".join(parts[1:4]), parts[4:])
        elif "resolve" in parts:
            kind = [] if parts[0] == "datasets" else ["models"]
            name, _, rest = "/".join([*kind, *parts]).partition("/resolve/")
            content = self._files(name, rest.partition("/")[0])
            if content is not None:
                self._file(content.get(rest.partition("/")[2]))
        else:
            self._answer({}, 404)

    def do_PUT(self) -> None:
        self.hub.stored[self.path] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        self.hub.asked.append(self.path)
        body = self._body()
        if self.path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": entry["path"], "uploadMode": "lfs" if entry["path"].endswith("tensors") else "regular"}
                for entry in files
            ]
            self._answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.hub.pushed[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    self.hub.pushed[value["path"]] = self.hub.stored[f"/lfs/{value['oid']}"]
            self._answer({"success": True, "commitOid": SHA, "commitUrl": f"{self.hub.url}/org/new/commit/{SHA}"})
        else:
            self._answer({"url": f"{self.hub.url}/org/new"})

    def _about(self, name: str, parts: list[str]) -> None:
        content = self._files(name, parts[1] if len(parts) > 1 else "main")
        if content is None:
            return
        if parts[:1] == ["tree"]:
            listed = ({"type": "file", "path": path, "size": len(found)} for path, found in content.items())
            self._answer([{**entry, "oid": "0" * 40} for entry in listed])
        else:
            siblings = [{"rfilename": path} for path in content]
            self._answer({"_id": "1", "id": name.partition("/")[2], "sha": SHA, "private": False, "siblings": siblings})

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Return the files of a repository; None after answering with an error."""
        found = self.hub.repos.get(name, (404, "RepoNotFound"))
        if isinstance(found, dict) and revision not in ("main", "v1", SHA):
            found = (404, "RevisionNotFound")
        if isinstance(found, dict):
            return found
        self._answer({"error": found[1]}, found[0], {"X-Error-Code": found[1]})
        return None

    def _file(self, content: bytes | None) -> None:
        if content is None:
            return self._answer({}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        self._send(content, 200, {"X-Repo-Commit": SHA, "ETag": f'"{etag}"'})

    def _answer(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), code, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
