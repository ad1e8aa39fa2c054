"""Watches a server while it is soaked: memory of its processes, and /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench.serve.server import parse_metrics, total

#: Environment variable with the file that `bench.stress.soak.probe` fills.
PROBE_VARIABLE = "TTLCACHE_SOAK_PROBE"
#: Lines of /metrics that labels may add after the warm-up: outcomes that are rare, and
#: never what a client made up.
MAX_NEW_LINES = 100
#: This many failed scrapes in a row: the server is gone.
MAX_FAILED_SCRAPES = 3
_SAMPLE_S = 5.0
_SCRAPE_TIMEOUT_S = 30.0
#: Growth compares this share of the samples at either end, at least three.
_END_SHARE = 0.1
_MIN_END_SAMPLES = 3
_WARM_UP_S = 60.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    """Seconds since the agents began."""
    api_rss_mib: float
    """Resident memory of the API server's process, MiB."""
    engine_rss_mib: float
    """Resident memory of the engine core and all other children, MiB."""
    metrics_lines: int
    scrape_s: float
    """Seconds that /metrics took to answer."""
    free_blocks: float


@dataclass(slots=True)
class Watch:
    """Samples so far; `failures` are scrapes that were not answered."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def after_warm_up(self) -> list[Sample]:
        """The samples after the first quarter of the time, and after a minute where
        that leaves half of them: so long vLLM alone fills its pools."""
        if not self.samples:
            return []
        end_s = self.samples[-1].at_s
        begin_s = max(end_s / 4, min(_WARM_UP_S, end_s / 2))
        return [sample for sample in self.samples if sample.at_s >= begin_s]


async def watch(
    client: httpx.AsyncClient,
    pid: int,
    stop: asyncio.Event,
    seen: Watch,
    on_sample: Callable[[Sample], None],
) -> None:
    """Sample every few seconds until `stop`; set it when the server is gone."""
    began_s = time.monotonic()
    failed_in_a_row = 0
    while not stop.is_set():
        try:
            seen.samples.append(await take_sample(client, pid, began_s))
        except (httpx.HTTPError, ProcessLookupError) as error:
            seen.failures.append(f"{type(error).__name__}: {error}")
            failed_in_a_row += 1
            if failed_in_a_row >= MAX_FAILED_SCRAPES:
                stop.set()
                return
        else:
            failed_in_a_row = 0
            on_sample(seen.samples[-1])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SAMPLE_S)


async def take_sample(client: httpx.AsyncClient, pid: int, began_s: float) -> Sample:
    """One scrape and one look at the processes.

    Raises:
        httpx.HTTPError: /metrics did not answer 200.
        ProcessLookupError: the API server's process is gone.
    """
    asked_s = time.monotonic()
    response = await client.get("/metrics", timeout=_SCRAPE_TIMEOUT_S)
    answered_s = time.monotonic()
    response.raise_for_status()
    api_rss_mib = rss_mib(pid)
    if not api_rss_mib:
        raise ProcessLookupError(f"process {pid} is gone")
    return Sample(
        at_s=answered_s - began_s,
        api_rss_mib=api_rss_mib,
        engine_rss_mib=sum(rss_mib(child) for child in descendants(pid)),
        metrics_lines=response.text.count("\n"),
        scrape_s=answered_s - asked_s,
        free_blocks=total(parse_metrics(response.text), "ttlcache_free_blocks"),
    )


def read_probe(path: Path, patience_s: float = 60.0) -> float:
    """MiB of ttlcache's own objects now; NaN: the probe did not answer."""
    path.touch()
    deadline_s = time.monotonic() + patience_s
    while not path.read_text().endswith("\n"):
        if time.monotonic() > deadline_s:
            return math.nan
        time.sleep(0.1)
    return float(path.read_text())


def growth_mib(values_mib: Sequence[float]) -> float:
    """How much the last tenth's median is above the first tenth's; NaN if empty."""
    if not values_mib:
        return float("nan")
    count = max(_MIN_END_SAMPLES, round(len(values_mib) * _END_SHARE))
    return statistics.median(values_mib[-count:]) - statistics.median(
        values_mib[:count]
    )


def descendants(pid: int) -> list[int]:
    """Process ids of all children and their children, in no order."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rss_mib(pid: int) -> float:
    """Resident memory of one process in MiB; 0 when it is gone or a zombie."""
    try:
        return float(psutil.Process(pid).memory_info().rss / _MIB)
    except psutil.Error:
        return 0.0
