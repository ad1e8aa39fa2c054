"""The one configuration of ttlcache: `kv_connector_extra_config`, validated once.

Unknown keys and ill-typed values are errors that name the key, the value and
what was expected: a misspelt key must stop the server, not change its policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ttlcache import policies
from ttlcache.errors import ConfigError, explain

#: Orderings by program, in which a later turn does not queue behind new programs.
PROGRAM_ORDERINGS = ("expected-finish", "ttl-aware", "program-fcfs")
#: What `ordering` may name besides "package.module:Class".
ORDERINGS = (
    "auto",
    *PROGRAM_ORDERINGS,
    "request-fcfs",
)
#: Whoever waited so many seconds goes first, if nothing else is said.
LAST_RESORT_S = 3600.0

#: Keys of lower tiers, which are passed through to them unread.
LOWER_TIER_PREFIXES = ("lmcache.",)


class TTLCacheConfig(BaseModel):
    """Settings of the retention layer. Frozen; every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: str = Field(
        default="adaptive",
        description="Retention policy by name, see `ttlcache.policies.names()`.",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict,
        description='Options of the policy, e.g. {"ttl_s": 2.0} for "fixed".',
    )
    ordering: str = Field(
        default="auto",
        description="Order of the waiting queue: expected-finish, ttl-aware (the "
        "paper's, §4.3), program-fcfs, request-fcfs, or a class of your own as "
        "package.module:Class. auto: expected-finish with policy adaptive, "
        "request-fcfs with observe, else ttl-aware.",
    )
    admission: Literal["auto", "none", "room-to-grow"] = Field(
        default="auto",
        description="Which programs may start: all (none), or new ones wait where "
        "those under way will fill the pool as they grow (room-to-grow). auto: "
        "room-to-grow with policy adaptive, ordering expected-finish, ttl-aware or "
        "program-fcfs, and no lower tier; else none.",
    )
    max_pinned_fraction: float = Field(
        default=0.9,
        ge=0.0,
        le=1.0,
        description="Largest share of the KV pool that pins may hold together.",
    )
    max_ttl_s: float = Field(
        default=300.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Upper bound of every TTL in seconds, client wishes included; "
        "counted anew for a parent when its sub-agent ends.",
    )
    quantum_turns: int | None = Field(
        default=None,
        ge=1,
        description="After so many turns, or the time that so many average turns take, "
        "a context queues as new, then after a quarter. Default: four average "
        "programs, at least 20 turns.",
    )
    max_queue_wait_s: float | None = Field(
        default=None,
        gt=0.0,
        allow_inf_nan=False,
        description="A request that waited this long goes first within its priority. "
        "Default: 3600; with policy adaptive and one tenant above a lower tier that "
        "keeps what it gets, twice the mean wait, at least 0.1, not for new programs "
        "that queue up.",
    )
    program_idle_s: float = Field(
        default=900.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A program silent for this long counts as ended.",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="vLLM tool parser asked where ours see no call in an output; "
        "default: the server's --tool-call-parser. none: outputs are not read, only "
        "hints name tools.",
    )
    lower_tier: Literal["auto", "none", "cpu", "lmcache"] = Field(
        default="auto",
        description="Where KV goes that GPU memory gives up: nowhere, to host memory "
        "of this engine (cpu), or to an LMCache server. auto: cpu on an NVIDIA GPU, or "
        "with cpu_gb; else none.",
    )
    cpu_gb: float | None = Field(
        default=None,
        gt=0.0,
        allow_inf_nan=False,
        description="With lower_tier cpu: host memory in GB (1e9 bytes), all ranks of "
        "the engine together. Default: a quarter of what is free, at most 16 a rank.",
    )
    demote: Literal["on-pressure", "on-expiry", "write-through"] = Field(
        default="on-pressure",
        description="When KV is copied to the lower tier: when GPU memory gets short "
        "(turns past their time stay cached until then), as soon as its pin expired, "
        "or as soon as it is computed.",
    )
    record_path: str | None = Field(
        default=None,
        description="Folder for recordings, which `ttlcache explain` and others read.",
    )
    allow_untested_vllm: bool = Field(
        default=False,
        description="Run on vLLM versions outside the tested range.",
    )

    @property
    def observes(self) -> bool:
        """Whether pins are kept in tables alone, and nothing else is changed."""
        return self.policy == "observe"

    @property
    def has_lower_tier(self) -> bool:
        """The connector's plugin resolves "auto"; unresolved it is "none"."""
        return self.lower_tier not in ("auto", "none")

    @property
    def reads_outputs(self) -> bool:
        """Whether the next tool is read from a turn's output."""
        return self.tool_call_parser != "none"

    @field_validator("ordering")
    @classmethod
    def _names_an_ordering(cls, name: str) -> str:
        module, _, class_name = name.partition(":")
        if name not in ORDERINGS and not (module and class_name):
            known = ", ".join(ORDERINGS)
            raise ValueError(f"one of {known}, or package.module:Class")
        return name


def ordering_in_force(config: TTLCacheConfig) -> str:
    """The ordering that is named, or the one that "auto" stands for."""
    if config.ordering != "auto":
        return config.ordering
    if config.observes:
        return "request-fcfs"
    return "expected-finish" if config.policy == "adaptive" else "ttl-aware"


def admission_in_force(config: TTLCacheConfig) -> str:
    """The admission control that is named, or the one that "auto" stands for.

    Other policies are what others published, and admit all.
    """
    if config.admission != "auto":
        return config.admission
    by_program = ordering_in_force(config) in PROGRAM_ORDERINGS
    ours = config.policy == "adaptive" and by_program
    return "room-to-grow" if ours and not config.has_lower_tier else "none"


def max_wait_in_force(config: TTLCacheConfig) -> float | None:
    """Seconds after which a request goes first; None: learnt above a lower tier.

    Other policies that are shipped are what others published, without such a bound:
    they have the last resort.
    """
    if config.observes:
        return math.inf  # vLLM's order, in which nobody is passed
    if config.max_queue_wait_s is None and config.policy != "adaptive":
        return LAST_RESORT_S if config.policy in policies.SHIPPED else None
    return config.max_queue_wait_s


def load_config(raw: Mapping[str, Any] | None) -> TTLCacheConfig:
    """Validate `kv_connector_extra_config`.

    Keys that begin with a lower tier's prefix ("lmcache.") are its own and are left
    to it.

    Raises:
        ConfigError: unknown key (with the nearest valid one), wrong type or range,
            unknown policy or policy option, a lower tier's key without that tier.
    """
    ours = {k: v for k, v in (raw or {}).items() if not _is_foreign(k)}
    try:
        config = TTLCacheConfig.model_validate(ours)
    except ValidationError as error:
        problems = explain(TTLCacheConfig, error)
        raise ConfigError(f"kv_connector_extra_config: {problems}") from None
    for key in (raw or {}).keys() - ours.keys():
        if not key.startswith(config.lower_tier + "."):
            raise ConfigError(
                f"kv_connector_extra_config: key {key!r} has no effect with "
                f"lower_tier {config.lower_tier!r}, expected: lower_tier "
                f"{key.partition('.')[0]!r}"
            )
    policies.create(config.policy, config.policy_options)
    ordering = ordering_in_force(config)
    _check_observes(config)
    if config.admission == "room-to-grow" and ordering not in PROGRAM_ORDERINGS:
        # Otherwise a held-back newcomer could stand before programs under way.
        raise ConfigError(
            f"kv_connector_extra_config: key 'admission' has value "
            f"{config.admission!r}, expected: 'none' with ordering "
            f"{ordering!r}, or ordering one of {PROGRAM_ORDERINGS}"
        )
    return config


def _check_observes(config: TTLCacheConfig) -> None:
    """What would change anything beside policy "observe" is refused."""
    for key, harmless in (
        ("ordering", ("auto", "request-fcfs")),
        ("admission", ("auto", "none")),
        ("lower_tier", ("auto", "none")),
    ):
        value = getattr(config, key)
        if config.observes and value not in harmless:
            raise ConfigError(
                f"kv_connector_extra_config: key {key!r} has value {value!r}, "
                f"expected: {harmless[0]!r} with policy 'observe'"
            )


def _is_foreign(key: object) -> bool:
    return isinstance(key, str) and key.startswith(LOWER_TIER_PREFIXES)
