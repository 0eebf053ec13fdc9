"""A stand-in for the Hugging Face hub on this machine: serves folders, or misbehaves."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = Path(__file__).resolve().parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    """Hub protocol for the repositories in ``server.repositories`` (name -> folder)."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _reply(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, file: Path):
        if not file.is_file():
            self._reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        body = file.read_bytes()
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        self._reply(200, body, ETag=etag, X_Repo_Commit=COMMIT)

    def _api(self, folder: Path, rest: str, body: bytes):
        def entry(path: Path):
            said = {"path": str(path.relative_to(folder)), "oid": COMMIT}
            if path.is_dir():
                return said | {"type": "directory"}
            return said | {"type": "file", "size": path.stat().st_size}

        _, action, *where = rest.split("/", 3) if rest else ("", "")
        if action == "tree":
            below = folder / unquote("/".join(where[1:]))
            self._reply(200, [entry(path) for path in sorted(below.glob("*"))])
        elif action == "paths-info":
            paths = [folder / path for path in parse_qs(body.decode())["paths"]]
            self._reply(200, [entry(path) for path in paths if path.exists()])
        else:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
            self._reply(200, {"id": folder.name, "sha": COMMIT, "siblings": siblings})

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        if self.server.mode == "broken":
            self._reply(500)
            return
        if self.server.mode == "hanging" or self.server.mode == "stalling" and "/resolve/" in path:
            self.server.over.wait()
            return
        for name, folder in self.server.repositories.items():
            found = re.fullmatch(rf"/api/(?:datasets|models)/{name}(/.*)?", path)
            if found:
                self._api(folder, found[1] or "", body)
                return
            found = re.fullmatch(rf"(?:/datasets)?/{name}/resolve/[^/]+/(.+)", path)
            if found:
                self._file(folder / unquote(found[1]))
                return
        self._reply(404, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = _answer


@contextmanager
def stand_in_hub(mode="serving", repositories=()):
    """Yields the address of a hub and the list of what it was asked; gone afterwards.

    ``mode`` is "serving", "refusing" (no one listens), "hanging" (never answers), "stalling"
    (answers, but never sends a file), or "broken" (status 500).
    """
    if mode == "refusing":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", []
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.mode, server.repositories, server.asked = mode, dict(repositories), []
    server.over = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def run_elsewhere(code, endpoint, home, **variables) -> str:
    """Runs code in a fresh process, for which the hub is at ``endpoint``: what it printed."""
    inherited = {name: value for name, value in os.environ.items() if "HF_" not in name}
    places = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | places | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def use_hub(monkeypatch, endpoint):
    """Points this process's hub library to an address: it reads HF_ENDPOINT only once."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template)
