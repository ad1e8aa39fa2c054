"""Hints of a request, and what of a client's values goes on."""

import math

import pytest

from tests.labels import UNFIT_REASONS
from ttlcache.programs import client_values as values
from ttlcache.programs.hints import MAX_KEY_CHARS, MAX_UNKNOWN_KEYS, parse_hints
from ttlcache.types import NO_HINTS, Hints

HUGE = "x" * 10_000_000


def own(**hints):
    return {"ttlcache": hints}


def test_no_parameters_or_those_of_others_are_no_hints():
    assert parse_hints(None) is NO_HINTS
    assert parse_hints(None, {}) is NO_HINTS
    assert parse_hints({}) == NO_HINTS
    assert parse_hints({"do_remote_prefill": True, "ttl": 5}, {"top_a": 1}) == NO_HINTS
    for junk in ([], 5, "ttlcache", [["ttlcache", {}]], 1.5, True):
        assert parse_hints(junk) == NO_HINTS


def test_a_full_set_of_hints():
    told = own(
        program_id="job-7",
        parent_id="job-1",
        is_last_step=True,
        tool=["bash", "search", ""],
        tool_eta_s=2.5,
        ttl="5m",
        priority_class=-3,
    )
    assert parse_hints(told) == Hints(
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
    expected = Hints(program_id="7", is_last_step=True, tools=("bash",), ttl_s=0.25)
    assert parse_hints(None, flat) == expected


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


#: Reason -> parameters.
REJECTED = {
    "not_a_dict": [
        {"ttlcache": None},
        {"ttlcache": "program_id=5"},
        {"ttlcache": [{"program_id": "a"}]},
    ],
    "id_type": [{"job_id": []}],
}
#: Reason, key -> values.
REJECTED_VALUES = {
    ("id_type", "program_id"): [1.5, True, {"a": [{"b": "c"}]}, b"a"],
    ("id_type", "parent_id"): [["a"]],
    ("id_empty", "program_id"): [""],
    ("id_empty", "parent_id"): [""],
    ("id_too_long", "program_id"): ["x" * 257, HUGE],
    ("id_range", "program_id"): [10**100_000, values.MAX_INT + 1],
    ("id_range", "parent_id"): [values.MIN_INT - 1],
    ("id_encoding", "program_id"): ["\ud800"],
    ("id_encoding", "parent_id"): ["a\udcffb"],
    ("bool_type", "is_last_step"): ["true", 2, 1.0, []],
    ("tool_type", "tool"): [5, {"name": "bash"}, ["bash", None], [["bash"]]],
    ("tool_too_long", "tool"): [HUGE, ["bash", "x" * 257]],
    ("tool_encoding", "tool"): [["bash", "\ud800"]],
    ("too_many_tools", "tool"): [["bash"] * (values.MAX_TOOLS + 1)],
    ("duration", "ttl"): [
        *(-1, math.nan, math.inf, 10**400, True, [5], {"seconds": 5}, b"5s", HUGE),
        *("-5m", "five", "1e3", "5 minutes", "inf", "", "5M", "s", "1e3s", "1..5s"),
        "1" * 31 + "s",
    ],
    ("duration", "tool_eta_s"): [-0.1, math.nan, "soon"],
    ("priority_type", "priority_class"): ["high", 1.0, False],
    ("priority_range", "priority_class"): [1001, -(10**50)],
}
CASES = [(reason, params) for reason, each in REJECTED.items() for params in each]
CASES += [
    (reason, own(**{key: value}))
    for (reason, key), values in REJECTED_VALUES.items()
    for value in values
]


@pytest.mark.parametrize(
    ("reason", "params"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_bad_hint_is_rejected_with_its_reason(reason, params):
    assert parse_hints(params) == Hints(rejected=(reason,))


def test_one_bad_value_costs_all_hints():
    assert parse_hints(own(program_id="good", ttl=-1)) == Hints(rejected=("duration",))


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("programid", "programid"),
        (5, "int"),
        (None, "NoneType"),
        (("program_id",), "tuple"),
        (HUGE, "x" * MAX_KEY_CHARS),
        ("ttlcache", "ttlcache"),
    ],
)
def test_an_unknown_key_costs_nothing_else(key, kept):
    expected = Hints(program_id="good", unknown_keys=(kept,))
    assert parse_hints({"ttlcache": {"program_id": "good", key: {}}}) == expected
    flat = {"ttlcache_program_id": "good", f"ttlcache_{kept}": 1}
    assert parse_hints(None, flat) == expected
    many = {f"key{number}": 1 for number in range(100_000)}
    assert len(parse_hints(own(**many)).unknown_keys) == MAX_UNKNOWN_KEYS


def test_limits_themselves_are_allowed():
    told = own(
        program_id="x" * 256,
        parent_id=values.MAX_INT,
        tool=["t" * 256] * values.MAX_TOOLS,
        priority_class=1000,
        ttl=0,
    )
    hints = parse_hints(told)
    assert not hints.rejected
    assert hints.ttl_s == 0.0
    assert len(hints.tools) == values.MAX_TOOLS
    assert parse_hints(own(program_id=values.MIN_INT)).program_id == str(values.MIN_INT)
    assert parse_hints(own(ttl=1e308, tool_eta_s="999999999h")) == Hints(
        ttl_s=values.MAX_SECONDS, tool_eta_s=values.MAX_SECONDS
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


# --- which of a client's values go on, and the reason of those that do not


SCALARS = (
    *(values.client_id, values.header_id, values.client_flag, values.client_tools),
    *(values.client_seconds, values.client_priority, values.client_number),
    *(values.header_flag, values.client_salt),
)
JUNK = (
    *(None, True, 0, -1, values.MAX_INT, values.MAX_INT + 1, -(1 << 63) - 1, 10**5000),
    *(math.nan, math.inf, 1e308, "", " ", "x", "x" * 1_000_000, "\ud800", "a\x00\n"),
    *("é", [], {}, ["x"] * 1000, {"a": 1}, b"x", object()),
)


def nested(depth):
    """So many lists, one in the other."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("read", SCALARS, ids=lambda read: read.__name__)
def test_whatever_comes_is_bounded_or_refused_for_a_known_reason(read):
    refused = set()
    for junk in (*JUNK, nested(10_000)):
        try:
            found = read(junk)
        except values.UnfitValueError as unfit:
            refused.add(str(unfit))
            continue
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, str):
                assert len(part.encode()) <= 4 * values.MAX_SALT_CHARS
            else:
                assert abs(part) <= values.MAX_SECONDS
    assert refused
    assert refused <= set(UNFIT_REASONS)


def test_what_fits_goes_on_as_it_is():
    told = {
        "remote_block_ids": list(range(100_000)),
        "deep": nested(values.MAX_DEPTH),
        "odd": [math.nan, 1 << 70, None, True, "é", {"a": ()}],
    }
    assert values.fitting(told) == (told, [])
    assert values.header_flag(" True ") is True
    assert values.holds_wide_int(told)


@pytest.mark.parametrize(
    ("reason", "entry"),
    [
        ("nested_too_deep", {"x": nested(values.MAX_DEPTH + 1)}),
        ("nested_too_deep", {"x": nested(100_000)}),
        ("nested_too_large", {"x": "y" * values.MAX_NESTED_SIZE}),
        ("nested_too_large", {"y" * values.MAX_NESTED_SIZE: 1}),
        ("nested_too_large", {"x": [0] * values.MAX_NESTED_SIZE}),
        ("nested_too_large", {"x": [[0] * 100_000] * 100_000}),
        ("nested_encoding", {"x": "\ud800"}),
        ("nested_encoding", {"\udc00": 1}),
        ("nested_encoding", {"x": [{"y": {"\ud800": 1}}]}),
    ],
)
def test_what_does_not_fit_stays_and_takes_nothing_with_it(reason, entry):
    assert values.fitting({"a": 1, **entry, "b": "c"}) == ({"a": 1, "b": "c"}, [reason])


def test_an_object_of_which_little_fits_is_read_no_further():
    told = {"a": 1, **{f"{n}\ud800": 1 for n in range(2 * values.MAX_UNFIT)}, "b": 2}
    kept, reasons = values.fitting(told)
    assert kept == {"a": 1}
    assert reasons == ["nested_encoding"] * values.MAX_UNFIT


def test_all_entries_together_are_bounded():
    told = {str(n): "x" * (values.MAX_NESTED_SIZE // 4) for n in range(10)}
    kept, reasons = values.fitting(told)
    assert len(kept) == 3
    assert set(reasons) == {"nested_too_large"}
