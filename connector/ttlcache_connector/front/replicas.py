"""Which replicas are under pressure, and where a program is: asked over HTTP.

Used for sub-agents only. Whatever fails here means "no pressure": they follow their
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import anyio
import httpx

from ttlcache_connector.front.forward import base_url, without_user

T = TypeVar("T")
log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
#: Requests that wait, summed over a replica's engines, are its pressure.
METRIC = "vllm:num_requests_waiting"
#: A replica is over its bound while more of them wait.
BOUND = 8.0
#: Seconds between two readings.
EVERY_S = 2.0
#: Programs kept of one replica's answer; vLLM's own has 200 an engine.
MAX_NAMES = 10_000


class Replicas:
    """Watches the replicas' gauge for the length of `watching`.

    Args:
        urls: the replicas themselves, not the router. None: no pressure is known.
        bound: of waiting requests; more are too many.
        api_key: the replicas' key, which `/ttlcache/programs` asks for.

    Raises:
        ConfigError: a URL that nobody can be asked at.
    """

    def __init__(
        self,
        urls: Sequence[str],
        bound: float = BOUND,
        api_key: str | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        for url in urls:
            base_url("--replica", url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
        self._headers = headers
        self._bound = bound
        self._urls = tuple(dict.fromkeys(url.strip().rstrip("/") for url in urls))
        #: Programs of the replicas that are over the bound.
        self._held: frozenset[str] = frozenset()
        #: Last reading of each; replicas that do not answer are left out.
        self.pressure: dict[str, float] = {}
        self._shown = {url: without_user(url) for url in self._urls}
        #: Questions that failed in a way nobody foresaw.
        self.faults = 0

    def status(self) -> dict[str, float]:
        """Last readings, for whoever asks: without what is secret of the URLs."""
        return {self._shown[url]: value for url, value in self.pressure.items()}

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

    def is_over(self, program: str) -> bool:
        """Whether the replica that holds `program` is over the bound.

        False while no replica is, and where no other one is known to be better off.
        """
        return program in self._held

    async def read(self) -> None:
        """One reading: all gauges, and the programs of replicas over the bound."""
        values = await asyncio.gather(*(self._gauge(url) for url in self._urls))
        pressure = {
            url: value
            for url, value in zip(self._urls, values, strict=True)
            if value is not None
        }
        over = [url for url, value in pressure.items() if value > self._bound]
        # One that does not answer is no better off: a child sent away would leave its
        # parent's prefix for a replica with as much to do.
        if len(over) == len(pressure):
            over = []
        held = await asyncio.gather(*(self._programs(url) for url in over))
        self.pressure, self._held = pressure, frozenset().union(*held)

    async def _watch(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(EVERY_S)

    async def _gauge(self, url: str) -> float | None:
        return await self._ask(
            f"{url}/metrics", lambda answer: gauge(answer.text, METRIC)
        )

    async def _programs(self, url: str) -> frozenset[str]:
        names = await self._ask(
            f"{url}/ttlcache/programs", lambda answer: _names(answer.json())
        )
        return names or frozenset()

    async def _ask(self, url: str, read: Callable[[httpx.Response], T]) -> T | None:
        """What `read` finds in the answer; None where there is none, whatever it is."""
        try:
            with anyio.fail_after(_TIMEOUT_S):
                answer = await self._client.get(url, headers=self._headers)
            answer.raise_for_status()
            return read(answer)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            # Not its text: it may have the URL with its password.
            log.debug("no answer from %s: %s", without_user(url), type(error).__name__)
        except Exception:  # noqa: BLE001 - whatever it is, the others are asked again
            self._fault(url)
        return None

    def _fault(self, url: str) -> None:
        self.faults += 1
        if self.faults == 1:
            name = without_user(url)
            log.warning("asking %s failed (logged once)", name, exc_info=True)


def gauge(text: str, metric: str) -> float | None:
    """A metric of an exposition, summed over its labels; None where it is not there."""
    pattern = rf"^{re.escape(metric)}(?:\{{[^\n]*\}})?[ \t]+(\S+)"
    values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return sum(values) if values else None


def _names(answer: object) -> frozenset[str]:
    """The programs that an answer lists; none where it is not one of ours."""
    found: set[str] = set()
    for engine in _list(answer, "engines"):
        found.update(
            name
            for row in _list(engine, "programs")
            if isinstance(row, Mapping) and isinstance(name := row.get("program"), str)
        )
    return frozenset(islice(found, MAX_NAMES))


def _list(holder: object, name: str) -> Sequence[object]:
    held = holder.get(name) if isinstance(holder, Mapping) else None
    return held if isinstance(held, list) else ()
