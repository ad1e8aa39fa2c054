from __future__ import annotations

import math

import pytest

from ttlcache.programs.client_values import (
    MAX_INT,
    MAX_SECONDS,
    MAX_TOOLS,
    MIN_INT,
)
from ttlcache.programs.hints import parse_hints
from ttlcache.types import NO_HINTS, Hints

HUGE = "x" * 10_000_000


def own(**hints):
    return {"ttlcache": hints}


def test_no_parameters_no_hints():
    assert parse_hints(None) is NO_HINTS
    assert parse_hints(None, {}) is NO_HINTS
    assert parse_hints({}) == NO_HINTS
    assert parse_hints({"do_remote_prefill": True, "ttl": 5}, {"top_a": 1}) == NO_HINTS


@pytest.mark.parametrize("junk", [[], 5, "ttlcache", [["ttlcache", {}]], 1.5, True])
def test_parameters_of_others_are_none_of_our_business(junk):
    assert parse_hints(junk) == NO_HINTS


def test_a_full_set_of_hints():
    hints = parse_hints(
        own(
            program_id="job-7",
            parent_id="job-1",
            is_last_step=True,
            tool=["bash", "search", ""],
            tool_eta_s=2.5,
            ttl="5m",
            priority_class=-3,
        )
    )
    assert hints == Hints(
        program_id="job-7",
        parent_id="job-1",
        is_last_step=True,
        tools=("bash", "search"),
        tool_eta_s=2.5,
        ttl_s=300.0,
        priority_class=-3,
    )


def test_flat_names_in_vllm_xargs():
    flat = {
        "ttlcache_program_id": 7,
        "ttlcache_is_last_step": 1,
        "ttlcache_tool": "bash",
        "ttlcache_ttl": "250ms",
        "not_ours": object(),
        5: "keys may be anything",
    }
    hints = parse_hints(None, flat)
    assert hints == Hints(
        program_id="7", is_last_step=True, tools=("bash",), ttl_s=0.25
    )


def test_vllm_continuum_names_work_in_either_place():
    names = {
        "job_id": "j",
        "is_last_step": False,
        "this_func_call": "bash",
        "last_func_call": {"accepted": "and ignored"},
    }
    expected = Hints(program_id="j", tools=("bash",))
    assert parse_hints(names) == expected
    assert parse_hints(None, names) == expected
    assert parse_hints({"ttlcache": names}) == expected


def test_the_dict_outranks_flat_names_and_none_means_not_said():
    hints = parse_hints(
        {"job_id": "flat", "ttlcache": {"program_id": "own", "tool": None}},
        {"ttlcache_program_id": "xargs", "ttlcache_tool": "bash"},
    )
    assert hints.program_id == "own"
    assert hints.tools == ("bash",)
    assert parse_hints(own(program_id=None, ttl=None)) == NO_HINTS


REJECTED = [
    # the dict itself
    ("not_a_dict", {"ttlcache": None}),
    ("not_a_dict", {"ttlcache": "program_id=5"}),
    ("not_a_dict", {"ttlcache": [{"program_id": "a"}]}),
    # keys
    ("unknown_key", own(programid="a")),
    ("unknown_key", {"ttlcache": {5: "a"}}),
    ("unknown_key", {"ttlcache": {None: "a"}}),
    ("unknown_key", {"ttlcache": {("program_id",): "a"}}),
    ("unknown_key", {"ttlcache": {HUGE: "a"}}),
    ("unknown_key", own(ttlcache={"program_id": "a"})),
    # ids
    ("id_type", own(program_id=1.5)),
    ("id_type", own(program_id=True)),
    ("id_type", own(program_id={"a": [{"b": "c"}]})),
    ("id_type", own(parent_id=["a"])),
    ("id_type", own(program_id=b"a")),
    ("id_type", {"job_id": []}),
    ("id_empty", own(program_id="")),
    ("id_empty", own(parent_id="")),
    ("id_too_long", own(program_id="x" * 257)),
    ("id_too_long", own(program_id=HUGE)),
    ("id_range", own(program_id=10**100_000)),
    ("id_range", own(program_id=MAX_INT + 1)),
    ("id_range", own(parent_id=MIN_INT - 1)),
    ("id_encoding", own(program_id="\ud800")),
    ("id_encoding", own(parent_id="a\udcffb")),
    # last step
    ("bool_type", own(is_last_step="true")),
    ("bool_type", own(is_last_step=2)),
    ("bool_type", own(is_last_step=1.0)),
    ("bool_type", own(is_last_step=[])),
    # tools
    ("tool_type", own(tool=5)),
    ("tool_type", own(tool={"name": "bash"})),
    ("tool_type", own(tool=["bash", None])),
    ("tool_type", own(tool=[["bash"]])),
    ("tool_too_long", own(tool=HUGE)),
    ("tool_too_long", own(tool=["bash", "x" * 257])),
    ("tool_encoding", own(tool=["bash", "\ud800"])),
    ("too_many_tools", own(tool=["bash"] * (MAX_TOOLS + 1))),
    # seconds
    ("duration", own(ttl=-1)),
    ("duration", own(ttl=math.nan)),
    ("duration", own(ttl=math.inf)),
    ("duration", own(ttl=10**400)),
    ("duration", own(ttl="-5m")),
    ("duration", own(ttl="five")),
    ("duration", own(ttl="1e3")),
    ("duration", own(ttl="5 minutes")),
    ("duration", own(ttl="inf")),
    ("duration", own(ttl="")),
    *(("duration", own(ttl=value)) for value in ("5M", "s", "1e3s", "1..5s", b"5s")),
    ("duration", own(ttl=HUGE)),
    ("duration", own(ttl="1" * 31 + "s")),
    ("duration", own(ttl=True)),
    ("duration", own(ttl=[5])),
    ("duration", own(ttl={"seconds": 5})),
    ("duration", own(tool_eta_s=-0.1)),
    ("duration", own(tool_eta_s=math.nan)),
    ("duration", own(tool_eta_s="soon")),
    # priority
    ("priority_type", own(priority_class="high")),
    ("priority_type", own(priority_class=1.0)),
    ("priority_type", own(priority_class=False)),
    ("priority_range", own(priority_class=1001)),
    ("priority_range", own(priority_class=-(10**50))),
]


@pytest.mark.parametrize(
    ("reason", "params"), REJECTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_bad_hint_is_rejected_with_its_reason(reason, params):
    assert parse_hints(params) == Hints(rejected=(reason,))


def test_one_bad_hint_costs_all_of_them():
    assert parse_hints(own(program_id="good", ttl=-1)) == Hints(rejected=("duration",))
    flat = {"ttlcache_program_id": "good", "ttlcache_nonsense": 1}
    assert parse_hints(None, flat) == Hints(rejected=("unknown_key",))


def test_limits_themselves_are_allowed():
    hints = parse_hints(
        own(
            program_id="x" * 256,
            parent_id=MAX_INT,
            tool=["t" * 256] * MAX_TOOLS,
            priority_class=1000,
            ttl=0,
        )
    )
    assert not hints.rejected
    assert hints.ttl_s == 0.0
    assert len(hints.tools) == MAX_TOOLS
    assert parse_hints(own(program_id=MIN_INT)).program_id == str(MIN_INT)
    assert parse_hints(own(ttl=1e308, tool_eta_s="999999999h")) == Hints(
        ttl_s=MAX_SECONDS, tool_eta_s=MAX_SECONDS
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (2, 2.0),
        (1.5, 1.5),
        ("250ms", 0.25),
        ("90s", 90.0),
        ("1.5s", 1.5),
        ("5m", 300.0),
        (" 1h ", 3600.0),
        ("300", 300.0),
        ("0.5", 0.5),
    ],
)
def test_durations(value, seconds):
    assert parse_hints(own(ttl=value)).ttl_s == pytest.approx(seconds)
