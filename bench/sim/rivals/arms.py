"""The rivals. Adding one: an entry in `_ALL`, or a file of its own (`PATH.py`).

An arm is vLLM's scheduler alone, or TTLConnector and TTLScheduler with some
`kv_connector_extra_config`; a few need a gate before the engine or a queue order of
their own. Any arm can be varied on the command line:

    --arms 'cachettl,adaptive,adaptive:{"admission":"none"}'

and those of `adaptive` have ablations (`bench.sim.rivals.ablations`):

    --arms 'adaptive,adaptive:no-repricing'
"""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.sim.rivals import ablations
from bench.sim.rivals.oracle import OraclePolicy
from bench.sim.rivals.published import ContinuumPublic, ContinuumV1, InferCept
from ttlcache import policies
from ttlcache.policies.cachettl import default_ttl_s
from ttlcache_sim.arm import Arm as BaseArm
from ttlcache_sim.arm import Extra, spelled_out
from ttlcache_sim.gates import Gate

if TYPE_CHECKING:  # it imports vLLM, and listing the arms must not
    from ttlcache_connector.connector import TTLConnector
    from ttlcache_sim.settings import Cell

policies.register(OraclePolicy.name, f"{OraclePolicy.__module__}:OraclePolicy")


#: Without our bounds on waiting: for rivals with none, or with one of their own in
#: their order or gate. The paper's rule with our victims (`cachettl` and its steps)
#: keeps ours; its own readings of victims have none.
_UNBOUNDED: Extra = {"max_queue_wait_s": 1e9, "quantum_turns": 10**9}


#: What an arm does not say, the paper does, whatever our defaults are.
_PAPER_ORDER: Extra = {"ordering": "ttl-aware", "admission": "none"}


@dataclass(frozen=True)
class Arm(BaseArm):
    """An arm with what only rivals have.

    gate: module of `bench.sim.rivals` whose `gate(cell, connector)` makes it, "" for
        none; in an arm's own file the name of its function there. It may change the
        engine, or the order of its queue, instead of holding requests.
    file: where the arm comes from, if it has a file of its own.
    bounded: with our bounds on waiting, at their defaults.
    override: connector settings beside `extra`, from the command line.
    ablation: an idea that the policy `adaptive` goes without, "" for none.
    """

    gate: str = ""
    bounded: bool = True
    override: Extra = field(default_factory=dict)
    ablation: str = ""
    file: str = ""

    def extra_config(self, mean_prefill_s: float) -> dict[str, Any] | None:
        extra = super().extra_config(mean_prefill_s)
        if extra is None:
            return None
        bounds = {} if self.bounded else _UNBOUNDED
        options = {
            **extra.get("policy_options", {}),
            **self.override.get("policy_options", {}),
        }
        merged = {**_PAPER_ORDER, **bounds, **extra, **self.override}
        return {**merged, "policy_options": options} if options else merged

    def engine_config(
        self, mean_prefill_s: float, *, above_tier: bool
    ) -> dict[str, Any] | None:
        """The same, with the ablation."""
        extra = self.extra_config(mean_prefill_s)
        if extra is None or not self.ablation:
            return super().engine_config(mean_prefill_s, above_tier=above_tier)
        policy = f"adaptive:{self.ablation}"
        return spelled_out(extra, above_tier=above_tier, policy=policy)

    def new_gate(self, cell: Cell, connector: TTLConnector | None) -> Gate:
        if not self.gate:
            return Gate()
        if self.file:
            of_file: Gate = own_file(self.file)[self.gate](cell, connector)
            return of_file
        module = import_module(f"bench.sim.rivals.{self.gate}")
        return module.gate(cell, connector)  # type: ignore[no-any-return]


def _static_ttl(mean_prefill_s: float) -> Extra:
    """T_default = ln B, B = prefill of the mean context, T = 0 and eta = 1."""
    ttl_s = default_ttl_s(mean_prefill_s)
    return {"policy": "fixed", "policy_options": {"ttl_s": ttl_s}}


_ALL = (
    Arm("vllm", "vLLM's own scheduler, request FCFS, no connector"),
    Arm(
        "program-fcfs",
        "programs in order of arrival, no retention (paper, Fig. 16)",
        {"policy": "none", "ordering": "program-fcfs"},
    ),
    Arm(
        "autellix",
        "PLAS (arXiv 2502.13965): least attained service, no retention",
        {"policy": "none", "ordering": "request-fcfs"},
        gate="plas",
        bounded=False,
    ),
    Arm(
        "infercept",
        "least waste (arXiv 2402.01869), FCFS by first arrival as in its scheduler",
        # The simulated copies slow nobody down; CacheTTL (v4 §6) granted that, too.
        {
            "policy": InferCept.name,
            "policy_options": {"swap_hidden": 1.0},
            "ordering": "program-fcfs",
        },
        bounded=False,
    ),
    Arm(
        "static-ttl",
        "one fixed TTL from the cold start (paper, Fig. 16): ln B of the mean context",
        _static_ttl,
    ),
    Arm(
        "continuum-public",
        "the authors' code: 2 s",
        {"policy": ContinuumPublic.name},
        bounded=False,
    ),
    Arm(
        "continuum-v1",
        "arXiv v1: empirical Bernstein",
        {"policy": ContinuumV1.name},
        bounded=False,
    ),
    Arm("cachettl", "CacheTTL v4, our victims", {"policy": "cachettl"}),
    Arm(
        "cachettl-paper",
        "the same as v4 §5.2 is worded: which pins end (`paper_victims`), "
        "no cap on pins, no bounds on waiting",
        {"policy": "cachettl", "max_pinned_fraction": 1.0},
        gate="paper_victims",
        bounded=False,
    ),
    Arm(
        "cachettl-strict",
        "the same by the letter of Algorithm 1: pins fall only when nothing runs",
        {"policy": "cachettl", "max_pinned_fraction": 1.0},
        gate="algorithm_1",
        bounded=False,
    ),
    Arm(
        "ski-rental",
        "hold for as long as losing it costs",
        {"policy": "ski-rental"},
    ),
    Arm(
        "thunderagent",
        "arXiv 2602.13692: pause and restore by working set, over plain vLLM",
        gate="thunderagent",
    ),
    Arm(
        "session-lease",
        "llm-d-router's draft plugin after ThunderAgent, over plain vLLM: sessions "
        "hold room until they are idle for 30 s and another one needs it",
        gate="session_lease",
    ),
    Arm(
        "adaptive",
        "ours: shadow price of memory, patience, whole victims, room to grow; "
        "our defaults",
        {"policy": "adaptive", "ordering": "auto", "admission": "auto"},
    ),
    Arm(
        "adaptive-ttl-aware",
        "the same in the paper's order: nothing is foreseen of the work that is left",
        {"policy": "adaptive", "ordering": "ttl-aware", "admission": "auto"},
    ),
    Arm(
        "oracle",
        "a reference point, no bound: lets in what fits until its end, least "
        "tokens x seconds first; knows each gap and pins exactly as long",
        {
            "policy": OraclePolicy.name,
            "max_ttl_s": 1e6,
            "ordering": "bench.sim.rivals.oracle:ShortestRemaining",
        },
        gate="oracle",
        tell_work=True,
        tell_gap=True,
        bounded=False,
    ),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}


def parse_arms(text: str) -> list[Arm]:
    """Arms from "a,b,NAME:{json},PATH.py"; a variant's name is its whole text.

    Raises:
        ValueError: unknown arm, bad JSON, or an override of plain vLLM.
    """
    return [_parse_arm(part) for part in _split(text)]


def own_file(path: str) -> dict[str, Any]:
    """The names that an arm's own file defines.

    Raises:
        ValueError: no such file.
    """
    if not Path(path).exists():
        raise ValueError(f"arm {path!r}: no such file")
    return runpy.run_path(path)


def _load_arm(path: str) -> Arm:
    arm = own_file(path).get("ARM")
    if not isinstance(arm, Arm) or callable(arm.extra):
        raise ValueError(
            f"arm {path!r}: expected ARM = Arm(...), its extra no function"
        )
    return replace(arm, file=path)


def _parse_arm(text: str) -> Arm:
    if text.endswith(".py"):
        return _load_arm(text)
    name, colon, override = text.partition(":")
    if name not in ARMS:
        raise ValueError(f"arm {name!r}: expected one of {', '.join(ARMS)}")
    arm = ARMS[name]
    if not colon:
        return arm
    if override in ablations.ABLATIONS:
        return _without(arm, text, override)
    try:
        extra = json.loads(override)
    except json.JSONDecodeError as error:
        known = ", ".join(ablations.ABLATIONS)
        raise ValueError(
            f"arm {text!r}: after the colon neither JSON ({error}) nor one of {known}"
        ) from None
    if not isinstance(extra, dict) or arm.extra is None:
        raise ValueError(f"arm {text!r}: only connector arms take a JSON object")
    return replace(arm, name=text, override=extra)


def _without(arm: Arm, name: str, ablation: str) -> Arm:
    extra = {} if arm.extra is None or callable(arm.extra) else arm.extra
    if extra.get("policy") != "adaptive":
        raise ValueError(f"arm {name!r}: only policy adaptive has ablations")
    return replace(arm, name=name, ablation=ablation)


def _split(text: str) -> list[str]:
    """At commas outside braces and brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]
