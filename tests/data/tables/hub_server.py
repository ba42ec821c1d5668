"""A Hub on loopback: the requests by which huggingface_hub finds and fetches a data set's files.

Run by tests as a thread; it serves one data set, or model, and notes what was asked for.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

NAME = "openai/gsm8k"
MODEL = "Qwen/Qwen2.5-0.5B"
FIRST, SECOND = "1" * 40, "2" * 40


class Hub(ThreadingHTTPServer):
    """Files by commit; `main` is the last one."""

    daemon_threads = True

    def __init__(self, commits: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits = commits
        self.main = next(iter(commits))
        self.fetched: list[str] = []
        """Names of files whose content was sent."""

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        api, files = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if MODEL in path:
            api, files = f"/api/models/{MODEL}", f"/{MODEL}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            self._send_info(path.removeprefix(api).removeprefix("/revision/") or "main")
        elif path.startswith(f"{api}/tree/"):
            commit = self._commit(path.removeprefix(f"{api}/tree/").split("/")[0])
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                for name, content in self.server.commits.get(commit, {}).items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            self._send_file(self._commit(revision), name, with_content=with_content)
        else:
            self._send_missing("RepoNotFound")

    def _commit(self, revision: str) -> str:
        return self.server.main if revision == "main" else revision

    def _send_info(self, revision: str) -> None:
        commit = self._commit(revision)
        if commit not in self.server.commits:
            self._send_missing("RevisionNotFound")
            return
        names = [{"rfilename": name} for name in self.server.commits[commit]]
        info = {"id": NAME, "sha": commit, "siblings": names, "private": False}
        self._send(200, json.dumps(info).encode())

    def _send_file(self, commit: str, name: str, *, with_content: bool) -> None:
        content = self.server.commits.get(commit, {}).get(name)
        if content is None:
            self._send_missing("EntryNotFound")
            return
        if with_content:
            self.server.fetched.append(name)
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}
        self._send(200, content, headers, with_content=with_content)

    def _send_missing(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_content: bool = True,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_content and self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(commits: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A running hub."""
    hub = Hub(commits)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join(60)
        hub.server_close()


def ask_beside(
    hub: Hub | None, home: Path, program: str, *arguments: str, **variables: str
) -> list[Any]:
    """What a process prints as JSON that has this cache and hub, or no network without a hub.

    huggingface_hub reads its environment when it is imported. Where the tests run without the real
    hub, this one is asked all the same.
    """
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    env = {
        **{name: value for name, value in os.environ.items() if name not in offline},
        "HF_HOME": str(home), "OMP_NUM_THREADS": "1",
        # Port 9 of loopback refuses.
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
