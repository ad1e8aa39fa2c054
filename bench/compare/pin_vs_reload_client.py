"""The client of `bench pin-vs-reload`: brings a context to one place, times its turn.

Where the KV of a timed turn came from is asked of the server afterwards. A turn that
was served from elsewhere is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from bench.serve.process import ServerError
from bench.serve.server import VLLMServer, by_label, total
from bench.serve.tier_server import TierServer
from ttlcache_lmcache.store.object_file import SUFFIX

#: Tokens that the next turn adds; they are prefilled in any case.
NEW_TOKENS = 32
#: Pins last this long unless they are claimed.
PIN_S = 2.0
#: Where a context is when its next turn comes, nearest first.
WAYS = ("claimed", "cpu", "disk", "prefill")
#: Turns that may come from elsewhere before the bench gives up.
TRIES = 5
WAIT_S = 60.0


class Client:
    """One program at a time, in token ids that nobody else uses."""

    def __init__(self, server: VLLMServer, tiers: TierServer, vocab: int) -> None:
        self._http = httpx.Client(base_url=server.base_url, timeout=600.0)
        self._server = server
        self._tiers = tiers
        self._vocab = vocab
        self._programs = 0

    def time_next_turn(self, tokens: int, way: str) -> float:
        """Seconds of a turn that extends `tokens`, whose KV comes by `way`.

        Raises:
            RuntimeError: it came from elsewhere, `TRIES` times.
        """
        for _ in range(TRIES):
            self._programs += 1
            name = f"timed-{self._programs}"
            context = self._tokens(tokens)
            self._ask(context, {"program_id": name, "tool": "timed"})
            self._bring(way)
            more = [*context, *self._tokens(NEW_TOKENS)]
            before = self._sources()
            began = time.perf_counter()
            cached = self._ask(more, {"program_id": name, "is_last_step": True})
            seconds = time.perf_counter() - began
            if self._came(way, before, cached):
                return seconds
        raise RuntimeError(f"{tokens} tokens do not come by way of {way!r}")

    def _bring(self, way: str) -> None:
        if way == "claimed":
            return
        self._expire()
        if way != "cpu" and not self._tiers.clear_cpu():
            raise ServerError("the CPU tier does not become empty")
        if way == "prefill":
            folder = self._tiers.options.disk
            assert folder is not None
            for file in folder.rglob(f"*{SUFFIX}"):
                file.unlink()

    def _expire(self) -> None:
        """Out of GPU memory; the copy is below."""
        time.sleep(PIN_S)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self._poke()
            samples = self._server.metrics()
            waiting = total(samples, "ttlcache_demoting_blocks")
            if waiting or total(samples, "ttlcache_pins_active"):
                continue
            # Refused while a copy under way holds blocks.
            answer = self._http.post("/reset_prefix_cache").raise_for_status()
            if answer.json()["success"]:
                return
        raise RuntimeError("the pin did not expire")

    def _came(self, way: str, before: dict[str, float], cached: int) -> bool:
        """Whether that way, and no other, served the turn; told a little later."""
        if way == "prefill" or not cached:
            return way == "prefill" and not cached
        deadline = time.monotonic() + WAIT_S
        while (found := self._sources()) == before:
            if time.monotonic() > deadline:
                return False
            self._poke()
        grown = {name for name in found if found[name] > before.get(name, 0.0)}
        # Which of LMCache's tiers had it follows from what was emptied before.
        return grown == {way if way == "claimed" else "lmcache"}

    def _sources(self) -> dict[str, float]:
        samples = self._server.metrics()
        claimed = by_label(samples, "ttlcache_pins_total", "outcome")["claimed"]
        reloads = by_label(samples, "ttlcache_reloads_total", "tier")
        return {"claimed": claimed, **reloads}

    def _poke(self) -> None:
        """An idle engine does not step."""
        self._ask([11, 12], {"is_last_step": True})

    def _ask(self, prompt: Sequence[int], hints: dict[str, object]) -> int:
        """One turn; its cached tokens."""
        details = self._server.ask(prompt, hints)["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    def _tokens(self, number: int) -> list[int]:
        self._programs += 1
        seed = self._programs * 7919
        return [5 + (seed + i * i * 31 + i) % (self._vocab - 5) for i in range(number)]
