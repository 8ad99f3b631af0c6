"""As much of a Weights & Biases server as a run needs, on this machine: it keeps the rows that it is sent, by run."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FILE_STREAM = "file_stream"
HISTORY = "wandb-history.jsonl"


@dataclass
class KeptRun:
    """What the server knows of one run.

    Attributes:
        name: as people read it.
        config: the values of its config.
        rows: its history.
        num_starts: how often a client asked for it by its id.
        exit_code: what the last client ended with; None while it has not.
    """

    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_starts: int = 0
    exit_code: int | None = None


class WandbServer(ThreadingHTTPServer):
    """Answers the queries that wandb makes for a run, as its own server does where the answer matters."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, KeptRun] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was ended leaves its connections open."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "RunResumeStatus":
                known = self.runs.get(variables["name"])
                bucket = None if known is None else _bucket(variables["name"], known)
                return {"model": {"id": "project", "name": variables["project"], "entity": {"id": "e", "name": "us"}, "bucket": bucket}}
            case "UpsertBucket":
                inserted = variables["name"] not in self.runs
                run = self.runs.setdefault(variables["name"], KeptRun())
                if variables.get("displayName"):
                    run.name, run.num_starts = variables["displayName"], run.num_starts + 1
                for key, entry in json.loads(variables.get("config") or "{}").items():
                    run.config[key] = entry["value"]
                return {"upsertBucket": {"bucket": _bucket(variables["name"], run), "inserted": inserted}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/files/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {}

    def take(self, run_id: str, update: dict[str, Any]) -> None:
        run = self.runs[run_id]
        history = (update.get("files") or {}).get(HISTORY)
        if history is not None:
            run.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if update.get("complete"):
            run.exit_code = update["exitcode"]


def _bucket(run_id: str, run: KeptRun) -> dict[str, Any]:
    config = json.dumps({key: {"value": value} for key, value in run.config.items()})
    telemetry = {"t": run.config["_wandb"]["t"]} if "_wandb" in run.config else {}  # without it the run counts as never started
    return {
        "id": "bucket", "name": run_id, "displayName": run.name, "summaryMetrics": "{}", "tags": [], "notes": None,
        "description": None, "sweepName": None, "config": config, "wandbConfig": json.dumps(telemetry),
        "historyLineCount": len(run.rows), "historyTail": json.dumps([json.dumps(run.rows[-1])] if run.rows else []),
        "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0,
        "project": {"id": "project", "name": "test", "entity": {"id": "e", "name": "us"}},
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are no news."""

    def do_POST(self) -> None:
        body = self._body()
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            query = json.loads(body)
            answer = {"data": self.server.answer(query.get("operationName") or "", query.get("variables") or {})}
        elif self.path.endswith(FILE_STREAM):
            self.server.take(self.path.split("/")[-2], json.loads(body))
        self._reply(answer)

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that runs inside."""
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
