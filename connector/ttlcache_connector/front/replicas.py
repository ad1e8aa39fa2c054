"""Which replicas are under pressure, and where a program is: asked over HTTP.

Used for sub-agents only. Whatever fails here means "no pressure": they follow their
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import httpx

log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PressureBound:
    """A replica is over it while the gauge, summed over engines, is greater."""

    metric: str = "vllm:num_requests_waiting"
    bound: float = 8.0
    every_s: float = 2.0


class Replicas:
    """Watches the replicas' gauge for the length of `watching`.

    Args:
        urls: the replicas themselves, not the router. None: no pressure is known.
        bound: which gauge, and what is too much.
        api_key: the replicas' key, which `/ttlcache/programs` asks for.
    """

    def __init__(
        self,
        urls: Sequence[str],
        bound: PressureBound,
        api_key: str | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
        self._headers = headers
        self._bound = bound
        self._urls = tuple(url.rstrip("/") for url in urls)
        #: Last reading of each; replicas that do not answer are left out.
        self.pressure: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reads the gauges until the block ends."""
        async with self._client:
            task = asyncio.create_task(self._watch()) if self._urls else None
            try:
                yield
            finally:
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    async def is_over(self, program: str) -> bool:
        """Whether the replica that holds `program` is over the bound.

        False while no replica is, and where another one is no better off.
        """
        over = {
            url for url, value in self.pressure.items() if value > self._bound.bound
        }
        if not over or len(over) == len(self._urls):
            return False
        holds = await asyncio.gather(*(self._holds(url, program) for url in over))
        return any(holds)

    async def read(self) -> None:
        """One reading of all gauges."""
        values = await asyncio.gather(*(self._read(url) for url in self._urls))
        self.pressure = {
            url: value
            for url, value in zip(self._urls, values, strict=True)
            if value is not None
        }

    async def _watch(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._bound.every_s)

    async def _read(self, url: str) -> float | None:
        try:
            answer = await self._client.get(f"{url}/metrics")
            answer.raise_for_status()
            return gauge(answer.text, self._bound.metric)
        except (httpx.HTTPError, ValueError):
            log.debug("no %s from %s", self._bound.metric, url, exc_info=True)
            return None

    async def _holds(self, url: str, program: str) -> bool:
        try:
            answer = await self._client.get(
                f"{url}/ttlcache/programs", headers=self._headers
            )
            answer.raise_for_status()
            return _names(answer.json(), program)
        except (httpx.HTTPError, json.JSONDecodeError):
            log.debug("no programs from %s", url, exc_info=True)
            return False


def gauge(text: str, metric: str) -> float | None:
    """A metric of an exposition, summed over its labels; None where it is not there."""
    pattern = rf"^{re.escape(metric)}(?:\{{[^\n]*\}})?[ \t]+(\S+)"
    values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return sum(values) if values else None


def _names(answer: object, program: str) -> bool:
    engines = answer.get("engines") if isinstance(answer, Mapping) else None
    for engine in engines or ():
        programs = engine.get("programs") if isinstance(engine, Mapping) else None
        if any(
            isinstance(p, Mapping) and p.get("program") == program
            for p in programs or ()
        ):
            return True
    return False
