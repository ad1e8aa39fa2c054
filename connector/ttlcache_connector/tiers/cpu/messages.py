"""What the two halves of the CPU tier send each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks of one turn or request: `gpu_blocks[i]` to or from `cpu_blocks[i]`."""

    gpu_blocks: list[int]
    cpu_blocks: list[int]


@dataclass
class CopyOrders:
    """stores: by a number of their own; loads: by request id.

    overdue: all loads under way while loads are stalled; their requests wait no longer.
    """

    stores: dict[int, BlockCopy] = field(default_factory=dict)
    loads: dict[str, BlockCopy] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.overdue)


@dataclass
class CopyReport(KVConnectorWorkerMetadata):
    """What ended in the workers.

    ended: on how many ranks each store or load ended, well or not.
    failed: those that failed on one rank at least.
    load_s: seconds of each load, of the slowest rank.
    can_copy: all ranks can, in both directions.
    """

    ended: dict[int | str, int] = field(default_factory=dict)
    failed: set[int | str] = field(default_factory=set)
    load_s: dict[str, float] = field(default_factory=dict)
    can_copy: bool = True

    def aggregate(self, other: KVConnectorWorkerMetadata) -> CopyReport:
        if not isinstance(other, CopyReport):
            return self
        ended, load_s = dict(self.ended), dict(self.load_s)
        for key, ranks in other.ended.items():
            ended[key] = ended.get(key, 0) + ranks
        for request_id, seconds in other.load_s.items():
            load_s[request_id] = max(seconds, load_s.get(request_id, 0.0))
        can_copy = self.can_copy and other.can_copy
        return CopyReport(ended, self.failed | other.failed, load_s, can_copy)
