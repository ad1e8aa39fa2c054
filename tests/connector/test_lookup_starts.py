"""Where a request's lookup begins; the real pair is in tests/e2e."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from ttlcache_connector.lmcache_server import rpc
from ttlcache_connector.tiers.lmcache.scheduler import SchedulerHalf
from ttlcache_connector.tiers.lmcache.suffix_index import LoneTails
from ttlcache_connector.tiers.lmcache.suffix_lookup import LookupStarts

CHUNK, BLOCK = 64, 16


class Answer:
    """What a server says to the question whether it heeds starts."""

    def __init__(self, heeds=True, *, knows=True, raises=False, cpu_bytes=100):
        self.is_here, self.raises = False, raises
        abilities = {"cpu_bytes": cpu_bytes} if heeds else None
        payload = json.dumps(abilities).encode()
        self.told = SimpleNamespace(success=knows, payload=payload)

    def query(self):
        return self.is_here

    def result(self, timeout):
        assert self.is_here
        if self.raises:
            raise RuntimeError("unimplemented")
        return self.told


class Rig:
    """LMCache's adapter with one client a server."""

    def __init__(self, *answers):
        self.answers = answers or (Answer(),)
        self.orders = []
        self.keys = []
        self.adapter = SimpleNamespace(
            req_clients={i: self.client(a) for i, a in enumerate(self.answers)},
            lmcache_tokens_per_chunk=CHUNK,
            _create_key=lambda *args, **kwargs: self.keys.append((args, kwargs)),
        )
        self.starts = LookupStarts(self.adapter)
        self.starts.tails = LoneTails(CHUNK, BLOCK)
        self.starts.tails.add(b"7")
        self.heard = []

    def client(self, answer):
        def call(order):
            self.orders.append(order.method)
            return answer

        return SimpleNamespace(server_module_call=call)

    def hear(self):
        self.starts.ask_servers(self.heard.append)
        for answer in self.answers:
            answer.is_here = True
        return self.starts

    def start_of_key(self, end=1000):
        self.adapter._create_key([1], start=0, end=end, request_id="r")
        return self.keys[-1][0][1]


def request(blocks=16):
    hashes = [str(i).encode() for i in range(blocks)]
    return SimpleNamespace(
        request_id="r", block_hashes=hashes, num_tokens=blocks * BLOCK + 1
    )


def test_a_lookup_begins_where_gpu_memory_ends_if_a_lone_tail_is_there():
    rig = Rig()
    starts = rig.hear()
    starts.set(request(), 8 * BLOCK + 15)
    assert starts.of("r") == 2 * CHUNK
    with starts.beginning_at(2 * CHUNK):
        assert rig.start_of_key() == 2 * CHUNK
        assert rig.start_of_key(end=CHUNK) == CHUNK, "never behind its end"
    assert rig.start_of_key() == 0, "no lookup: a release"
    starts.set(request(), 16 * BLOCK)  # what else stands there is there as well
    assert starts.of("r") == 4 * CHUNK
    starts.forget("r")
    assert starts.of("r") == 0


@pytest.mark.parametrize("hit_tokens", [0, 7 * BLOCK, 8 * BLOCK - 1])
def test_one_that_gpu_memory_does_not_reach_is_not_looked_for(hit_tokens):
    rig = Rig()
    starts = rig.hear()
    starts.set(request(), 8 * BLOCK)
    starts.set(request(), hit_tokens)  # asked anew
    assert starts.of("r") == 0


def test_before_gpu_memory_is_known_a_lookup_begins_with_the_last_tail():
    rig = Rig()
    starts = rig.hear()
    starts.set_early(request())
    assert starts.of("r") == 2 * CHUNK
    starts.set_early(request(blocks=7))
    assert starts.of("r") == 0


def test_after_a_reset_nothing_below_is_worth_a_thing():
    starts = Rig().hear()
    starts.reset()
    assert begins_at_0(starts)


def begins_at_0(starts):
    starts.set_early(request())
    starts.set(request(), 16 * BLOCK)
    return starts.of("r") == 0


def test_no_lookup_begins_inside_before_the_server_said_that_it_may():
    rig = Rig()
    starts = rig.starts
    assert not starts.are_heeded
    starts.ask_servers(rig.heard.append)
    assert rig.orders == [rpc.LOOKUPS_BEGIN_ANYWHERE]
    assert not starts.are_heeded
    assert begins_at_0(starts)
    with starts.beginning_at(2 * CHUNK):
        assert rig.start_of_key() == 0
    rig.answers[0].is_here = True
    assert starts.are_heeded
    starts.ask_servers(rig.heard.append)  # it went away and came back
    rig.answers[0].is_here = False
    assert not starts.are_heeded


@pytest.mark.parametrize(
    "answers",
    [
        (Answer(heeds=False),),
        (Answer(knows=False),),
        (Answer(), Answer(knows=False)),
        (Answer(raises=True),),
    ],
)
def test_every_server_has_to_heed_it(answers):
    starts = Rig(*answers).hear()
    assert not starts.are_heeded
    assert begins_at_0(starts)


@pytest.mark.parametrize(
    ("answers", "cpu_bytes"),
    [
        ((Answer(),), 100),
        ((Answer(cpu_bytes=70), Answer(), Answer()), 210),
        ((Answer(heeds=False),), 0),
        ((Answer(), Answer(raises=True)), 0),
    ],
)
def test_servers_say_how_much_memory_they_have(answers, cpu_bytes):
    rig = Rig(*answers)
    starts = rig.hear()
    assert starts.are_heeded is (cpu_bytes > 0)
    assert starts.are_heeded is (cpu_bytes > 0)
    assert rig.heard == [cpu_bytes], "told once"


def test_promotion_ahead_begins_where_a_turns_tail_does():
    """What did not go down with it is in GPU memory."""
    rig = Rig()
    begun = []
    rig.adapter.maybe_submit_lookup_request = lambda *_: begun.append(
        rig.start_of_key()
    )
    half = object.__new__(SchedulerHalf)
    half._ahead, half._loads, half._adapter = None, {}, rig.adapter
    half._epochs = SimpleNamespace(salt=lambda salt: salt)
    half._lookups = SimpleNamespace(starts=rig.hear())
    half._queue = SimpleNamespace(kept_tokens={"r": 2 * CHUNK, "whole": 0}.get)
    half.is_up = lambda: True
    assert half.promote("r", [1], "")
    half._ahead = None
    assert half.promote("whole", [1], "")
    assert begun == [2 * CHUNK, 0]


def test_above_several_kv_groups_nothing_goes_down_alone():
    starts = Rig().hear()
    starts.tails = None
    assert not starts.are_heeded
    starts.reset()
