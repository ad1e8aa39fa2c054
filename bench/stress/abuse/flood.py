"""What a flood of pinned sessions costs another tenant, on vLLM's real scheduler.

The same requests arrive in every arm, so that the total load is equal; only what the
flooding client says about them differs.
"""

from __future__ import annotations

import math
import random

from bench.command import one_of
from bench.stress.abuse.patterns import VOCAB, Asked, Pattern, Sent
from bench.stress.abuse.play import Load, Waits, play

#: How the flooding client behaves: it says that each session is over; it wants every
#: session kept for ever; each session pretends to be another tenant (cache_salt),
#: which a gateway must not let clients choose.
ARMS = ("polite", "flood", "salts")
SESSION_TOKENS = 240
SESSIONS_A_S, PROGRAMS_A_S = 20.0, 0.5


def run_arm(arm: str, sessions: int, policy: str = "cachettl") -> Waits:
    """What the tenant that is watched went through in one arm.

    Args:
        sessions: of the flooding client; programs of the other tenant come meanwhile.
    """
    one_of("arm", arm, ARMS)
    load = Load(
        agents=int(sessions / SESSIONS_A_S * PROGRAMS_A_S),
        agents_a_s=PROGRAMS_A_S,
        give_up_s=math.inf,
    )
    flood = Pattern(
        lambda asked: _session(arm, asked),
        clients=sessions,
        starts_at_s=0.0,
        every_s=1 / SESSIONS_A_S,
        repeats=False,
    )
    return play(flood, load, tenants=2, config={"policy": policy})


def _session(arm: str, asked: Asked) -> Sent:
    number = asked.client
    # An id that a program of the other tenant has, or one of its own.
    name = f"agent-{number % 50}" if number % 3 == 0 else f"session-{number}"
    hints: dict[str, object] = {"program_id": name, "is_last_step": True}
    if arm != "polite":
        hints = {"program_id": name, "ttl": 1e9, "tool": f"tool-{number}"}
    rng = random.Random(number)
    prompt = [rng.randrange(VOCAB) for _ in range(SESSION_TOKENS)]
    salt = f"clients-{number}" if arm == "salts" else None
    return Sent(prompt, hints, max_tokens=1, salt=salt)
