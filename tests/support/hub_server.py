"""A Hugging Face hub on this machine: the calls by which huggingface_hub uploads a model.

Repositories, branches and large files are in memory. Every request and its token is kept.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aTokenOfThisTest"
SMALL = 4096  # bytes of a file that is no large one


class HubServer(ThreadingHTTPServer):
    """What was uploaded: `repos` has the files of each branch, `public` the visibility."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.public: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.refuse: dict[str, tuple[int, str]] = {}  # part of an address -> status and message

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def _serve(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        hub.requests.append(f"{self.command} {path}")
        if "/upload/" not in path:  # a signed address needs no token
            hub.tokens.add(self.headers.get("Authorization", ""))
        for part, (status, message) in hub.refuse.items():
            if part in path:
                return self._answer({"error": message}, status)
        if "/upload/" in path:
            return self._keep(path.rpartition("/")[2], body)
        if hub.tokens != {f"Bearer {TOKEN}"}:
            return self._answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        repo, _, rest = path.removeprefix("/api/models/").partition("/")
        name, _, rest = rest.partition("/")
        self._of_repo(f"{repo}/{name}", rest, body)

    do_GET = do_POST = do_PUT = _serve

    def _chunks(self) -> bytes:
        content = b""
        while self.headers.get("Transfer-Encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            content += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                break
        return content

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repos:
            there = {"error": "You already created it", "url": f"{self.server.address}/{name}"}
            return self._answer(there, 409)
        hidden = asked.get("private") or asked.get("visibility") == "private"
        self.server.repos[name], self.server.public[name] = {"main": {}}, not hidden
        self._answer({"url": f"{self.server.address}/{name}"})

    def _of_repo(self, name: str, rest: str, body: bytes) -> None:
        branches = self.server.repos.get(name)
        action, _, branch = rest.partition("/")
        if branches is None:
            return self._answer({"error": "Repository not found"}, 404)
        if not action:
            about = {"id": name, "private": not self.server.public[name], "sha": "0" * 40}
            return self._answer({**about, "siblings": [], "tags": []})
        if action == "branch":
            there = branch in branches
            branches.setdefault(branch, {})
            return self._answer({"error": "it exists"} if there else {}, 409 if there else 200)
        if branch not in branches:
            return self._answer({"error": "Invalid rev id"}, 404)
        if action == "preupload":
            return self._answer({"files": [_mode(file) for file in json.loads(body)["files"]]})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[branch][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branches[branch][value["path"]] = self.server.large[value["oid"]]
        url = f"{self.server.address}/{name}/commit/{'1' * 40}"
        self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            href = f"{self.server.address}/upload/{wanted['oid']}?signature=secret"
            new = {"actions": {"upload": {"href": href}}}
            objects.append({**wanted, **({} if wanted["oid"] in self.server.large else new)})
        self._answer({"transfer": "basic", "objects": objects})

    def _keep(self, oid: str, body: bytes) -> None:
        fits = hashlib.sha256(body).hexdigest() == oid
        if fits:
            self.server.large[oid] = body
        self._answer({}, 200 if fits else 400)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "regular" if file["size"] <= SMALL else "lfs"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
