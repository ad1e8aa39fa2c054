"""What a client may tell the server module about a request: one JSON list per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ttlcache.errors import ConfigError
from ttlcache.types import GapKey

#: Method of the server module's RPC (LMCache's server-module envelope).
SET_TTL = "ttlcache.set_ttl"
#: Hints in one call; a scheduler's step finishes fewer requests than this.
MAX_HINTS = 4096

Part = Annotated[str, Field(max_length=64)]


class Hint(BaseModel):
    """About the turn that ended, or is about to end, with this request.

    request_id: the engine's id of it, as its LMCache connector passes it on.
    ttl_s: seconds to keep its KV, counted from the turn's end.
    is_last_step: no turn follows; its KV goes first.
    tool: what runs until the next turn: the key of the gap history, in one or two
        parts from coarse to fine.
    program: whose turn it is, by any name; for turns that look nothing up.
    is_over: the turn is over now, though its session may end later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_id: str = Field(min_length=1, max_length=512)
    ttl_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    is_last_step: bool = False
    tool: str | tuple[Part, ...] | None = Field(default=None, max_length=64)
    program: str | None = Field(default=None, min_length=1, max_length=512)
    is_over: bool = False

    @property
    def gap_key(self) -> GapKey | None:
        parts = (self.tool,) if isinstance(self.tool, str) else self.tool
        return GapKey(*parts[:2]) if parts and parts[0] else None


_HINTS = TypeAdapter(Annotated[list[Hint], Field(max_length=MAX_HINTS)])


def encode(hints: Sequence[Hint]) -> bytes:
    return _HINTS.dump_json(list(hints), exclude_defaults=True)


def decode(payload: bytes) -> list[Hint]:
    """Parse the payload of a `SET_TTL` call.

    Raises:
        ConfigError: not a JSON list of hints, or too many.
    """
    try:
        return _HINTS.validate_json(payload)
    except ValidationError as error:
        raise ConfigError(f"{SET_TTL}: {error}") from None
