"""Tool gaps with stated moments and stated heavy tails.

Every tool is a mixture of at most two log-normals with one common sigma:

plain   one log-normal with a mean of its own;
tailed  quick nine times out of ten, slow otherwise, the slow part's mean chosen so
        that the slowest tenth has the wanted share of the tool's time (`cd x && …`:
        the command behind it decides);
free    one log-normal whose own sigma gives the wanted share: the slowest tenth of
        a log-normal has Phi(sigma - 1.2816) of its sum (`fetch_url`).

The common sigma is solved so that the mix of all tools has the wanted mean and
standard deviation exactly; a finite sample of so heavy a tail has less of both.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

from ttlcache_sim.load.programs import Moments

_NORMAL = NormalDist()
_SLOW_CHANCE = 0.1
_Z90 = _NORMAL.inv_cdf(1.0 - _SLOW_CHANCE)


@dataclass(frozen=True, slots=True)
class Tool:
    """weight: share of the calls. relative_mean: of its seconds.

    tail_share: what its slowest tenth shall have of its time, None for a plain one.
    two_parts: whether that comes from a mixture (`tailed`) or from a sigma (`free`).
    """

    name: str
    weight: float
    relative_mean: float
    tail_share: float | None = None
    two_parts: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """A log-normal component: chance within its tool, mean seconds, sigma."""

    chance: float
    mean_s: float
    sigma: float


@dataclass(frozen=True, slots=True)
class GapMix:
    """Draws (tool, seconds). Build with `fit`."""

    tools: tuple[Tool, ...]
    parts: tuple[tuple[_Part, ...], ...] = field(default=())

    @classmethod
    @lru_cache(maxsize=16)
    def fit(cls, wanted: Moments, tools: tuple[Tool, ...]) -> GapMix:
        """Solve the common sigma by bisection.

        Raises:
            ValueError: the tools differ more than the wanted std allows.
        """
        low, high = 1e-3, 4.0
        if _second_moment(_parts(wanted.mean, tools, low), tools) > _square(wanted):
            raise ValueError(f"tools differ more than a std of {wanted.std:g} s allows")
        for _ in range(80):
            middle = 0.5 * (low + high)
            second = _second_moment(_parts(wanted.mean, tools, middle), tools)
            low, high = (middle, high) if second < _square(wanted) else (low, middle)
        return cls(tools, _parts(wanted.mean, tools, low))

    def draw(self, rng: random.Random) -> tuple[str, float]:
        (index,) = rng.choices(range(len(self.tools)), [t.weight for t in self.tools])
        parts = self.parts[index]
        part = parts[0]
        if len(parts) > 1 and rng.random() >= part.chance:
            part = parts[1]
        mu = math.log(part.mean_s) - part.sigma**2 / 2
        return self.tools[index].name, rng.lognormvariate(mu, part.sigma)

    @property
    def moments(self) -> Moments:
        """Exact, not sampled."""
        mean = sum(
            tool.weight * part.chance * part.mean_s
            for tool, parts in zip(self.tools, self.parts, strict=True)
            for part in parts
        ) / sum(tool.weight for tool in self.tools)
        second = _second_moment(self.parts, self.tools)
        return Moments(mean, math.sqrt(second - mean * mean))


def _square(wanted: Moments) -> float:
    return wanted.mean**2 + wanted.std**2


def _parts(
    mean_s: float, tools: tuple[Tool, ...], sigma: float
) -> tuple[tuple[_Part, ...], ...]:
    total = sum(tool.weight for tool in tools)
    level = sum(tool.weight * tool.relative_mean for tool in tools) / total
    parts: list[tuple[_Part, ...]] = []
    for tool in tools:
        own_s = mean_s * tool.relative_mean / level
        if tool.tail_share is None:
            parts.append((_Part(1.0, own_s, sigma),))
        elif tool.two_parts:
            quick = _quick_share(tool.tail_share, sigma)
            parts.append(
                (
                    _Part(1 - _SLOW_CHANCE, own_s * quick / (1 - _SLOW_CHANCE), sigma),
                    _Part(_SLOW_CHANCE, own_s * (1 - quick) / _SLOW_CHANCE, sigma),
                )
            )
        else:
            own_sigma = _NORMAL.inv_cdf(tool.tail_share) + _Z90
            parts.append((_Part(1.0, own_s, own_sigma),))
    return tuple(parts)


def _quick_share(tail_share: float, sigma: float) -> float:
    """Share of the time in the quick part for the wanted share of the slowest tenth.

    The slowest tenth has more than the slow part alone where the two overlap, so the
    quick part's share is solved for. A sigma whose plain log-normal is above the
    wanted share cannot be met: the parts then coincide.
    """
    low, high = 1e-6, 1 - _SLOW_CHANCE
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (
            (middle, high) if _tail_of(middle, sigma) > tail_share else (low, middle)
        )
    return 0.5 * (low + high)


def _tail_of(quick: float, sigma: float) -> float:
    """Share of the time that the slowest tenth of a two-part tool of mean 1 has."""
    parts = (
        (1 - _SLOW_CHANCE, quick / (1 - _SLOW_CHANCE)),
        (_SLOW_CHANCE, (1 - quick) / _SLOW_CHANCE),
    )
    low, high = -40.0, 40.0  # log of the threshold
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = sum(c * (1 - _cdf(middle, mean, sigma, 0.0)) for c, mean in parts)
        low, high = (middle, high) if above > _SLOW_CHANCE else (low, middle)
    return sum(c * mean * (1 - _cdf(low, mean, sigma, sigma)) for c, mean in parts)


def _cdf(log_x: float, mean: float, sigma: float, shift: float) -> float:
    """Of a log-normal (shift 0), or of its time-weighted version (shift sigma)."""
    return _NORMAL.cdf((log_x - math.log(mean) + sigma**2 / 2) / sigma - shift)


def _second_moment(
    parts: tuple[tuple[_Part, ...], ...], tools: tuple[Tool, ...]
) -> float:
    return sum(
        tool.weight * part.chance * part.mean_s**2 * math.exp(part.sigma**2)
        for tool, own in zip(tools, parts, strict=True)
        for part in own
    ) / sum(tool.weight for tool in tools)
