"""Others' load generators: their results are read, their data is what they expect."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.compare.harness import read_metrics
from bench.compare.harness_clients import HARNESSES, Load
from bench.compare.pin_vs_reload_client import TRIES, Client
from ttlcache_sim.load.programs import Program, Turn

#: What each wrote, without most of what is not read; and one number of it.
CAPTURED = json.loads((Path(__file__).parent / "harness_results.json").read_text())
READ = {
    "agentic-bench": ("metrics.t2plus_ttft.p99_ms", 50.04),
    "vllm-bench": ("p99_e2el_ms", 220.07),
    "agentx": ("request_latency.p99", 197.77),
    "agent-sim": ("records.*.wall", (0.1698 + 0.14514) / 2),
}
PROGRAM = Program(
    "a", 1.0, (Turn(100, 10, "ls", 0.5), Turn(40, 7, "cat", 2.0), Turn(9, 5, "", 0.0))
)
ABENCH, VLLM = HARNESSES["agentic-bench"], HARNESSES["vllm-bench"]


@pytest.mark.parametrize("name", HARNESSES)
def test_every_metric_is_read_from_what_it_wrote(name, tmp_path):
    path, chosen = tmp_path / HARNESSES[name].result, HARNESSES[name]
    path.write_text(json.dumps(CAPTURED[name]) + "\n")
    found = read_metrics(path, chosen.metrics)
    assert list(found) == list(chosen.metrics)
    metric, value = READ[name]
    assert found[metric] == pytest.approx(value)


def test_what_was_not_written_is_said(tmp_path):
    path = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match=r"wrote no result.json: see .*client.log"):
        read_metrics(path, ("failed",))
    path.write_text('{"records": [{"ttft": 1.0}, {"ttft": null}, {"ttft": 2.0}]}')
    assert read_metrics(path, ("records.*.ttft",)) == {"records.*.ttft": 1.5}
    with pytest.raises(RuntimeError, match=r"has no records.\*.wall"):
        read_metrics(path, ("records.*.wall",))


@pytest.fixture
def load(tmp_path):
    return Load("http://x", Path("model"), tmp_path, [PROGRAM], at_once=2, seed=0)


def test_prompts_of_traces_grow_by_whole_blocks(load):
    VLLM.arguments(load)
    told = [json.loads(line) for line in (load.folder / "trace.jsonl").open()]
    assert [each["input_length"] for each in told] == [128, 192, 224]
    assert [each["timestamp"] for each in told] == [1.0, 4.5, 9.5]
    for before, after in pairwise(told):
        assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
    HARNESSES["agentx"].arguments(load)
    trace = json.loads((load.folder / "traces" / "a.json").read_text())
    assert [each["in"] for each in trace["requests"]] == [128, 192, 224]
    assert [each["t"] for each in trace["requests"]] == [0.0, 3.5, 8.5]


# --- `bench pin-vs-reload` and `bench prices`: which turns count, and at what price


class Asked(Client):
    """Answers from a list; every entry is what one turn found."""

    def __init__(self, turns):
        self.turns, self._programs, self._vocab = turns, 0, 100
        self.counts = {"claimed": 0.0, "lmcache": 0.0}
        self.first = False

    def _bring(self, way):
        pass

    def _poke(self):
        pass

    def _sources(self):
        return dict(self.counts)

    def _ask(self, prompt, hints):
        self.first = not self.first
        if self.first:
            return 0
        source, cached = self.turns.pop(0)
        if source:
            self.counts[source] += 1
        return cached


def test_a_turn_served_from_elsewhere_is_not_counted():
    """A reset that vLLM refused leaves the context in GPU memory, for example."""
    client = Asked([("claimed", 96), ("lmcache", 96), ("", 0)])
    assert client.time_next_turn(96, "disk") >= 0
    assert client.turns == [("", 0)]
    assert client.time_next_turn(96, "prefill") >= 0
    client = Asked([("lmcache", 96)] * TRIES)
    with pytest.raises(RuntimeError, match="do not come by way of 'prefill'"):
        client.time_next_turn(96, "prefill")
