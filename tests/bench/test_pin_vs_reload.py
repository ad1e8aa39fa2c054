"""`bench pin-vs-reload` and `bench prices`: which turns count, and at what price."""

from __future__ import annotations

import pytest

from bench.compare.pin_vs_reload_client import TRIES, Client
from bench.compare.prices import Prices


class Asked(Client):
    """Answers from a list; every entry is what one turn found."""

    def __init__(self, turns):
        self.turns, self._programs, self._vocab = turns, 0, 100
        self.counts = {"claimed": 0.0, "cpu": 0.0, "disk": 0.0}
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
    client = Asked([("claimed", 96), ("cpu", 96), ("disk", 96), ("", 0)])
    assert client.time_next_turn(96, "disk") >= 0
    assert client.turns == [("", 0)]
    assert client.time_next_turn(96, "prefill") >= 0
    client = Asked([("cpu", 96)] * TRIES)
    with pytest.raises(RuntimeError, match="do not come by way of 'prefill'"):
        client.time_next_turn(96, "prefill")


def test_prices_of_lengths_between_the_timed_ones_lie_between_their_seconds():
    prices = Prices({1_000: 1.0, 3_000: 5.0}, [(500, 1.0), (2_000, 3.0)])
    assert prices.should_be_s == [0.5, 3.0]
    assert prices.ratios == [2.0, 1.0]
    assert prices.ratio == pytest.approx(4.0 / 3.5)
