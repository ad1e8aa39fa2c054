"""The real Claude Code CLI in front of a real server, nothing of it kept.

The CLI is installed from npm into a temporary folder, and talks to a bridge on this
machine. The bridge sends each of its requests to vLLM as it came, but for the length of
the answer: the tiny model cannot call tools, so the bridge then answers with a scripted
tool call and vLLM's own token counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

PACKAGE = "@anthropic-ai/claude-code"
#: Of the other tools only Bash is called, with commands that change nothing.
MAIN_TOOL = "Bash"


def install(folder: Path) -> Path:
    """The CLI's program; skips, and says why, where npm cannot bring it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Claude Code's CLI needs npm, which is not on this machine")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    done = subprocess.run(
        [*command, PACKAGE], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-500:]}")
    found = sorted(folder.glob("node_modules/@anthropic-ai/claude-code-*/claude"))
    if not found:
        pytest.skip(f"{PACKAGE} has no program for this machine")
    return found[0]


@dataclass
class Bridge:
    """Between the CLI and vLLM; ends the conversation after `num_turns`."""

    server_url: str
    num_turns: int
    hits: list[float] = field(default_factory=list)
    """Cached share of each prompt of the main conversation."""
    errors: list[str] = field(default_factory=list)

    def forward(self, headers: Any, body: dict[str, Any]) -> dict[str, Any]:
        """vLLM's usage of the CLI's request, an answer of a few tokens asked for."""
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower().startswith(("x-claude", "authorization", "anthropic"))
        }
        short = {**body, "max_tokens": 8, "stream": False}
        answer = httpx.post(
            f"{self.server_url}/v1/messages", json=short, headers=kept, timeout=300.0
        )
        if answer.status_code != 200:
            self.errors.append(answer.text[:2000])
            return {"input_tokens": 1, "output_tokens": 1}
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def answer(self, headers: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of Anthropic's stream for one request."""
        usage = self.forward(headers, body)
        cached = usage.get("cache_read_input_tokens", 0)
        content: dict[str, Any] = {"type": "text", "text": "Done."}
        if MAIN_TOOL in {tool["name"] for tool in body.get("tools", ())}:
            created = usage.get("cache_creation_input_tokens", 0)
            prompt = usage["input_tokens"] + created + cached
            self.hits.append(cached / prompt)
            number = len(self.hits)
            if number < self.num_turns:
                content = {
                    "type": "tool_use",
                    "id": f"toolu_{number:04d}",
                    "name": MAIN_TOOL,
                    "input": {"command": f"echo step {number}"},
                }
        return _events(body["model"], content, usage, len(self.hits))


def _events(
    model: str, content: dict[str, Any], usage: dict[str, Any], number: int
) -> list[dict[str, Any]]:
    message = {
        "id": f"msg_{number}",  # the CLI joins answers of one id
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    calls = content["type"] == "tool_use"
    if calls:
        empty: dict[str, Any] = {**content, "input": {}}
        text = json.dumps(content["input"])
        delta = {"type": "input_json_delta", "partial_json": text}
    else:
        empty = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": content["text"]}
    end = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": empty},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 8}},
        {"type": "message_stop"},
    ]


def _handler(bridge: Bridge) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Nothing on the terminal."""

        def do_HEAD(self) -> None:
            self._send(200, "text/plain", b"")

        def do_GET(self) -> None:
            self._send(404, "application/json", b"{}")

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.path.split("?")[0] != "/v1/messages":
                self._send(404, "application/json", b"{}")
                return
            events = bridge.answer(self.headers, json.loads(raw))
            lines = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events]
            self._send(200, "text/event-stream", "".join(lines).encode())

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def converse(
    program: Path,
    folder: Path,
    server_url: str,
    num_turns: int,
    *,
    arguments: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Bridge:
    """One conversation of the CLI with the server; `settings` are its environment.

    It sees an empty home, an empty folder and this machine's own address, no more.
    """
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir(parents=True)
    bridge = Bridge(server_url, num_turns)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(bridge))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{http.server_port}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "API_TIMEOUT_MS": "300000",
        "IS_SANDBOX": "1",
        **(settings or {}),
    }
    try:
        done = subprocess.run(
            [program, "-p", "Count in steps.", "--allowedTools", MAIN_TOOL, *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        http.shutdown()
        http.server_close()
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return bridge
