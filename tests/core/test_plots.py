"""What the timeline of a recording shows of pins that nobody claimed."""

from __future__ import annotations

from ttlcache.analysis import timeline
from ttlcache.analysis.recording import PinLog, ProgramLog, Recording, TurnLog
from ttlcache.analysis.summary import summarize


def test_idle_memory_and_final_turns_have_colours_of_their_own():
    """The pin lives from 10 to 30; a request lacked memory from 15 to 20."""
    waits = TurnLog(2, "w", 12.0, wait_s=8.0, memory_wait_s=5.0)
    for next_gap_s, kind in ((25.0, "pinned in vain"), (None, "pinned, no next turn")):
        held = TurnLog(1, "h", 8.0, wait_s=0.0, finish_s=10.0, next_gap_s=next_gap_s)
        held.pin = PinLog(1, 10.0, 4, 20.0, "expired", 30.0)
        log = ProgramLog("held", "run", [held])
        recording = Recording([log, ProgramLog("waits", "run", [waits])], {"run": {}})
        wanted = recording.wanted("run")
        assert wanted == [(15.0, 20.0)]
        bars = timeline.spans_of(log, wanted, origin_s=0.0)
        assert bars[kind] == [(15.0, 5.0)]
        assert bars["idle memory, pinned"] == [(10.0, 20.0)]
        summary = summarize(recording)
        assert (summary.wasted_block_s, summary.idle_block_s) == (20.0, 60.0)


def test_what_is_drawn_over_idle_memory_can_be_seen():
    kinds = list(timeline.COLOURS)
    idle = kinds.index("idle memory, pinned")
    assert idle < kinds.index("pinned in vain")
    assert idle < kinds.index("pinned, no next turn")
