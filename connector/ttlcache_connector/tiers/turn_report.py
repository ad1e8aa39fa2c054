"""What is reported of a turn to a lower tier that decides by itself."""

from __future__ import annotations

import hashlib
import uuid

from ttlcache.programs.model import Program, RequestRecord
from ttlcache.types import UNKNOWN_GAP, Decision
from ttlcache_connector.tiers.base import TurnEnd

#: Programs that only we tell apart are numbered, in every engine from 0.
_ENGINE = uuid.uuid4().hex


def turn_end(
    request_id: str, record: RequestRecord, decision: Decision | None
) -> TurnEnd:
    """What a tier may know of a finished request's turn.

    decision: None where nothing was decided, as for an aborted request.
    """
    program = record.program
    name = program_name(program)
    if program.ended:
        return TurnEnd(request_id, name)
    if decision is None:
        return TurnEnd(request_id, name, 0.0)
    key = program.open_turns[-1].gap_key if program.open_turns else UNKNOWN_GAP
    tool = () if key == UNKNOWN_GAP else tuple(part for part in key if part)
    return TurnEnd(request_id, name, decision.ttl_s, decision.reason == "client", tool)


def program_name(program: Program) -> str:
    """The same for the same client's program on every engine; hides the tenant."""
    key = program.key
    text = f"{_ENGINE}/{key}" if isinstance(key, int) else repr(key)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
