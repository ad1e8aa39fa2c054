"""vLLM's scheduler, and clients that change the head of their prompts."""

from __future__ import annotations

from tests.connector.conftest import totals
from ttlcache.programs.divergence import Cause
from ttlcache_connector.role.metrics import _KNOWN_LABELS
from ttlcache_connector.role.requests import log

SYSTEM = [*range(1000, 1200)]


def converse(engine, session_id: str, *, changes: bool) -> None:
    """Five turns; `changes`: a token more in system text with each of them."""
    history = [*range(300)]
    for number in range(5):
        more = [5] * number if changes else []
        prompt = [*SYSTEM, *more, *range(2000, 2400), *history]
        engine.turn(f"{session_id}-{number}", prompt, session_id=session_id)
        history += range(500, 540)


def test_the_cause_is_logged_once_with_its_remedy(make_engine, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *args: lines.append(text % args))
    engine = make_engine(num_blocks=1000)
    converse(engine, "good", changes=False)
    assert lines == []
    for name in ("bad", "worse"):
        converse(engine, name, changes=True)
    (line,) = lines
    assert line.startswith("ttlcache: prompt diverged at token 192 of ")
    assert "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in line
    assert totals(engine)["turns_diverged:head"] == 6


def test_every_cause_is_a_label_from_the_start():
    assert _KNOWN_LABELS["turns_diverged"] == tuple(Cause)
