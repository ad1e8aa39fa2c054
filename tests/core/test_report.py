"""`ttlcache report`: one page, of a recording or of a server's metrics."""

from functools import partial
from html.parser import HTMLParser

import pytest

from tests.commands import output_of
from tests.core.stories import with_prefill_cost
from tests.fake_engine import FakeEngine
from ttlcache.analysis.reader import load
from ttlcache.analysis.recording import ProgramLog, Recording, TurnLog
from ttlcache.analysis.summary import summarize
from ttlcache.cli.main import app
from ttlcache.cli.report_tables import of_metrics, of_recording
from ttlcache.programs.divergence import REMEDIES, Cause, Divergence
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder

NAME = "<script>alert(1)</script>"


@pytest.fixture
def observed(tmp_path):
    """A recording under policy `observe`: a real pin would have saved 20 tokens."""
    place = tmp_path / "recording"
    recorder = Recorder(place, {"policy": "observe"}, run="7-1")
    engine = FakeEngine({"policy": "observe"}, pool_blocks=16)
    with_prefill_cost(engine, telemetry=Telemetry(recorder=recorder))
    context = engine.turn("a1", list(range(17)), [90, 91, 92, 93], program=NAME)
    engine.turn("flood", list(range(300, 360)), is_last_step=True)
    engine.arrive("a2", [*context, 1, 2, 3], program=NAME, is_last_step=True)
    engine.step(seconds=1.0)
    assert engine.admit("a2")
    engine.finish("a2")
    engine.controller.telemetry.close()
    return place


run = partial(output_of, app, "report")


class Page(HTMLParser):
    """What a browser would load, and the text that it would show."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_beside_it(observed, tmp_path):
    path = tmp_path / "page.html"
    run(str(observed), "--html", str(path))
    page = Page(path.read_text())
    assert len(page.loaded) == page.tags.count("img") == 4
    assert all(each.startswith("data:image/png;base64,") for each in page.loaded)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in path.read_text()
    shown = " ".join(page.words)
    for part in ("what pins saved", "measured", "estimated", NAME):
        assert part in shown


def test_savings_of_would_be_pins_are_told_apart(observed):
    assert "tokens that pins would have saved" in run(str(observed))
    found = summarize(load(observed))
    assert (found.savable_tokens, found.savable_s) == (20, 20.0)
    assert (found.saved_tokens, found.claimed_tokens) == (0, 0)


def turn(number, **more):
    return TurnLog(number, 10.0 * number, prompt_tokens=100, **more)


def tables_of(*turns):
    recording = Recording([ProgramLog("job", "run", [*turns])], {"run": {}})
    tables = of_recording(recording, summarize(recording))
    return {table.title: table for table in tables}


def test_it_says_who_waited_and_for_what():
    tables = tables_of(
        turn(1, wait_s=5.0, memory_wait_s=3.0, refused_for_growth=True),
        turn(2, wait_s=2.0, memory_wait_s=1.5),
        turn(3, wait_s=0.0),
    )
    everyone, job = tables["who waited, and for what"].rows
    assert job == ("job", "7 s", "1.5 s", "3 s", "2.5 s", "5 s", "2", "measured")
    assert everyone == ("all", *job[1:])


def test_programs_that_break_their_prefix_are_named_with_the_remedy():
    head = Divergence(Cause.HEAD, 40, 100)
    unsure = Divergence(Cause.MIDDLE, 50, 100, is_sure=False)
    tables = tables_of(
        *(turn(n, wait_s=0.0, divergence=d) for n, d in enumerate((head, head, unsure)))
    )
    table = tables["programs that broke their prefix"]
    assert table.rows == [("job", "head", "120", "2", "estimated")]
    assert table.notes == (f"head: {REMEDIES[Cause.HEAD]}",)


METRICS = """
# TYPE ttlcache_pins_total counter
ttlcache_pins_total{engine="0",model_name="m",outcome="claimed"} 3.0
ttlcache_pins_total{engine="1",model_name="m",outcome="claimed"} 1.0
ttlcache_claimed_tokens_total{engine="0",model_name="m"} 4000.0
ttlcache_prefill_tokens_saved_total{engine="0",model_name="m"} 3000.0
ttlcache_prefill_seconds_saved_total{engine="0",model_name="m"} 2.5
ttlcache_tool_gap_seconds_bucket{engine="0",le="1.0",tool_class="test"} 1.0
ttlcache_tool_gap_seconds_sum{engine="0",tool_class="test"} 30.0
ttlcache_tool_gap_seconds_count{engine="0",tool_class="test"} 2.0
ttlcache_turns_diverged_total{cause="head",engine="0"} 7.0
ttlcache_turns_diverged_total{cause="output",engine="0"} 9.0
"""


def test_a_server_is_told_from_its_metrics():
    savings, tools, broken, pins = (t for t in of_metrics(METRICS) if t.rows)
    assert savings.rows == [
        ("prompt tokens served from pins", "4,000", "4", "measured"),
        ("saved: plain vLLM would have evicted", "3,000", "4", "estimated"),
        ("prefill saved", "2.5 s", "4", "estimated"),
    ]
    assert tools.rows == [("test", "15 s", "2", "measured")]
    assert broken.rows == [("head", "7", "7", "measured")]
    assert pins.rows == [("claimed", "4", "4", "measured")]


def test_what_it_cannot_tell_of_is_an_error(observed):
    for mistake in ((), (str(observed), "--url", "http://x"), ("--url", "nowhere")):
        output = run(*mistake, status=1)
        assert "error:" in output
        assert "Traceback" not in output
