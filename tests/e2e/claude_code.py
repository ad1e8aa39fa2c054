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
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

PACKAGE = "@anthropic-ai/claude-code"
#: The only one that it has: all its tools are 25,000 tokens more.
TOOL = "Bash"


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


def hit_of(usage: Mapping[str, Any]) -> float:
    """Share of a prompt that was cached, of what `/v1/messages` answers."""
    cached = usage["cache_read_input_tokens"]
    created = usage.get("cache_creation_input_tokens", 0)
    return float(cached / (cached + created + usage["input_tokens"]))


@dataclass
class Bridge:
    """Between the CLI and vLLM; ends the conversation after `num_turns`."""

    server_url: str
    num_turns: int
    hits: list[float] = field(default_factory=list)
    """Of the main conversation's turns."""
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
            return {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": 0}
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def answer(self, headers: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of Anthropic's stream for one request."""
        usage = self.forward(headers, body)
        command = None
        if TOOL in {tool["name"] for tool in body.get("tools", ())}:
            self.hits.append(hit_of(usage))
            if len(self.hits) < self.num_turns:
                command = f"echo step {len(self.hits)}"
        message = {
            "id": f"msg_{len(self.hits)}",  # the CLI joins answers of one id
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": "Done."}
        end = {"stop_reason": "end_turn", "stop_sequence": None}
        if command is not None:
            own = {"id": f"toolu_{len(self.hits):04d}", "name": TOOL}
            block = {"type": "tool_use", **own, "input": {}}
            text = json.dumps({"command": command})
            delta = {"type": "input_json_delta", "partial_json": text}
            end["stop_reason"] = "tool_use"
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
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
    settings: Mapping[str, str],
) -> list[float]:
    """Shares of the prompts that were cached in one conversation of the CLI.

    It sees an empty home, an empty folder, this machine's own address and `settings` as
    its environment, no more.
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
        **settings,
    }
    tools = ("--allowedTools", TOOL, "--tools", TOOL)
    try:
        done = subprocess.run(
            [program, "-p", "Count in steps.", *tools],
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
    assert bridge.errors == []
    assert len(bridge.hits) == num_turns
    return bridge.hits
