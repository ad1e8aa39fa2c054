"""Lower tiers in virtual time: capacity-limited stores behind FIFO links.

Contexts are written through when a turn finishes: to the CPU over the host link, and
on from there to the SSD. They are read back, FIFO, over the same links' other
direction. A tier evicts the least recently used context, tail first.

Simplifications, all in favour of offloading: writes never hold up the GPU blocks
(they are staged), reads and writes do not slow each other down, and a link reaches
`LINK_EFFICIENCY` of its peak whatever the size of the pieces.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ttlcache_sim.steps.hardware import Hardware
from ttlcache_sim.tiers.offload import Offload

#: Part of the peak that large pinned copies reach (PCIe protocol overhead).
LINK_EFFICIENCY = 0.8
#: Seconds from asking to the first byte: look-up and launch.
LINK_LATENCY_S = 0.001


class Link:
    """One direction of a wire: transfers one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def book(self, size: float, ready_s: float) -> tuple[float, float]:
        """Start and end of a transfer asked for at `ready_s`."""
        start_s = max(ready_s, self.free_s)
        seconds = LINK_LATENCY_S + size / self.bytes_per_s
        self.free_s = start_s + seconds
        return start_s, self.free_s


@dataclass(slots=True)
class _Stored:
    """A context prefix in one tier: its tokens, and those on their way."""

    tokens: int = 0
    coming: int = 0
    coming_at_s: float = 0.0

    def at(self, now_s: float) -> int:
        if self.coming_at_s <= now_s:
            self.tokens = max(self.tokens, self.coming)
        return self.tokens

    @property
    def reserved(self) -> int:
        return max(self.tokens, self.coming)


class Tier:
    """Contexts by program, least recently used first; sizes in tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._used = 0

    def tokens(self, program_id: str, now_s: float) -> int:
        """Of the program's context, how much can be read now."""
        stored = self._stored.get(program_id)
        return stored.at(now_s) if stored is not None else 0

    def expected(self, program_id: str) -> int:
        """The same, once all writes are done."""
        stored = self._stored.get(program_id)
        return stored.reserved if stored is not None else 0

    def touch(self, program_id: str) -> None:
        if program_id in self._stored:
            self._stored.move_to_end(program_id)

    def put(self, program_id: str, tokens: int, now_s: float, arrives_s: float) -> None:
        """The first `tokens` of the context will be there at `arrives_s`.

        What arrived or was on its way before counts as before; another write
        supersedes one that is still on its way.
        """
        stored = self._stored.setdefault(program_id, _Stored())
        stored.at(now_s)
        self._used -= stored.reserved
        stored.coming, stored.coming_at_s = tokens, arrives_s
        self._used += stored.reserved
        self._stored.move_to_end(program_id)
        self._shrink()

    def drop(self, program_id: str) -> None:
        """The program ended: its context is of no use."""
        stored = self._stored.pop(program_id, None)
        if stored is not None:
            self._used -= stored.reserved

    def _shrink(self) -> None:
        while self._used > self.capacity_tokens:
            program_id, stored = next(iter(self._stored.items()))
            excess = self._used - self.capacity_tokens
            keep = stored.reserved - excess
            if keep <= 0:
                del self._stored[program_id]
                self._used -= stored.reserved
                continue
            self._used -= excess
            stored.tokens = min(stored.tokens, keep)
            stored.coming = min(stored.coming, keep)


@dataclass(frozen=True, slots=True)
class Load:
    """A read under way. tier: the slowest one it reads from."""

    tier: str
    tokens: int
    asked_s: float
    arrives_s: float


class TierStore:
    """CPU and SSD below one GPU (or one group of them)."""

    def __init__(
        self,
        offload: Offload,
        hardware: Hardware,
        bytes_per_token: float,
        gpus: int = 1,
    ) -> None:
        """
        Args:
            gpus: each has a host link of its own; the SSD is one drive.
        """
        self._bytes_per_token = bytes_per_token
        rate = hardware.link * LINK_EFFICIENCY * gpus
        self.to_cpu, self.from_cpu = Link(rate), Link(rate)
        self.to_ssd = Link(hardware.ssd_write * LINK_EFFICIENCY)
        self.from_ssd = Link(hardware.ssd_read * LINK_EFFICIENCY)
        self.cpu = Tier(int(offload.cpu_bytes / bytes_per_token))
        self.ssd = Tier(int(offload.ssd_bytes / bytes_per_token))
        self._has_ssd = offload.ssd_bytes > 0
        self.loaded_tokens = 0
        self.reload_s = 0.0

    def readable(self, program_id: str, now_s: float) -> int:
        """Tokens of the context that some tier can give back now."""
        tokens = self.cpu.tokens(program_id, now_s)
        if self._has_ssd:
            tokens = max(tokens, self.ssd.tokens(program_id, now_s))
        return tokens

    def holder(self, program_id: str) -> str | None:
        """The fastest tier that will hold most of the context, if any."""
        in_cpu = self.cpu.expected(program_id)
        in_ssd = self.ssd.expected(program_id) if self._has_ssd else 0
        if in_cpu and 2 * in_cpu >= in_ssd:
            return "cpu"
        return "ssd" if in_ssd else None

    def write(self, program_id: str, tokens: int, now_s: float) -> None:
        """A turn finished with a context of `tokens`: store what is new."""
        new = tokens - self.cpu.expected(program_id)
        if new > 0:
            _, cpu_s = self.to_cpu.book(new * self._bytes_per_token, now_s)
            self.cpu.put(program_id, tokens, now_s, cpu_s)
        else:
            cpu_s = now_s
            self.cpu.touch(program_id)
        if not self._has_ssd:
            return
        new = tokens - self.ssd.expected(program_id)
        if new > 0:
            _, ssd_s = self.to_ssd.book(new * self._bytes_per_token, cpu_s)
            self.ssd.put(program_id, tokens, now_s, ssd_s)

    def load(self, program_id: str, start: int, stop: int, now_s: float) -> Load:
        """Read context tokens [start, stop), which must be readable."""
        in_cpu = min(max(self.cpu.tokens(program_id, now_s), start), stop)
        size = (stop - start) * self._bytes_per_token
        ready_s, tier, ssd_s = now_s, "cpu", now_s
        if in_cpu < stop:
            from_ssd = (stop - in_cpu) * self._bytes_per_token
            ready_s, ssd_s = self.from_ssd.book(from_ssd, now_s)
            tier = "ssd"
            self.cpu.put(program_id, stop, now_s, ssd_s)
        # Both links work on it at once: the slower one decides.
        _, host_s = self.from_cpu.book(size, ready_s)
        self.cpu.touch(program_id)
        self.ssd.touch(program_id)
        arrives_s = max(ssd_s, host_s)
        self.loaded_tokens += stop - start
        self.reload_s += arrives_s - now_s
        return Load(tier, stop - start, now_s, arrives_s)

    def drop(self, program_id: str) -> None:
        self.cpu.drop(program_id)
        self.ssd.drop(program_id)
