"""The program queue against vLLM's `RequestQueue` contract."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sortedcontainers import SortedKeyList
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from ttlcache_connector.queue import HoldScope, ProgramQueue


def request(name: str) -> Request:
    return Request(name, [1], SamplingParams(max_tokens=1), None)


class Rig:
    """A queue whose keys and clock the test sets by hand."""

    def __init__(self, max_wait_s: float = 10.0) -> None:
        self.keys: dict[str, tuple[int, ...]] = {}
        self.now_s = 0.0
        self.overdue = 0
        self.moved: dict[str, tuple[int, ...]] = {}
        self.newcomers: set[str] = set()
        self.arrived_s: dict[str, float] = {}
        self._max_wait_s = max_wait_s
        self.queue = ProgramQueue(self, lambda: self.now_s)

    def priority(self, request: Request) -> tuple[int, ...]:
        return self.keys[request.request_id]

    def queued_s(self, request: Request) -> float | None:
        return self.arrived_s.get(request.request_id)

    def is_newcomer(self, request: Request) -> bool:
        return request.request_id in self.newcomers

    def refresh_place(self, request: Request) -> bool:
        key = self.moved.pop(request.request_id, None)
        if key is not None:
            self.keys[request.request_id] = key
        return key is not None

    def max_wait_s(self, newcomers: int = 0) -> float:
        return self._max_wait_s if newcomers < 3 else 1e9

    def on_overdue(self) -> None:
        self.overdue += 1

    def add(self, name: str, *key: int) -> None:
        self.keys[name] = (0, *key)
        self.queue.add_request(request(name))

    def pop_all(self) -> list[str]:
        return [self.queue.pop_request().request_id for _ in range(len(self.queue))]


def test_pop_returns_what_was_peeked_even_if_keys_changed_in_between():
    rig = Rig()
    for key, name in enumerate("abc"):
        rig.add(name, key)
    assert rig.queue.peek_request().request_id == "a"
    rig.keys["c"] = (0, -1)
    rig.queue.rekey("c")
    rig.queue.rekey("nobody")
    assert rig.pop_all() == ["a", "c", "b"]


def test_age_beats_key_and_survives_being_skipped():
    rig = Rig(max_wait_s=10.0)
    rig.add("old", 9)
    rig.now_s = 6.0
    skipped = rig.queue.pop_request()
    rig.queue.prepend_requests([skipped])
    rig.add("new", 1)
    rig.now_s = 11.0
    assert rig.queue.peek_request().request_id == "old"
    assert rig.queue.peek_request().request_id == "old"
    assert rig.queue.is_overdue("old")
    assert rig.overdue == 1


def test_newcomers_that_queue_up_pass_no_other_by_their_age():
    rig = Rig(max_wait_s=10.0)
    rig.newcomers = {f"new-{number}" for number in range(4)}
    for number in range(2):
        rig.add(f"new-{number}", 7 + number)
    rig.now_s = 1.0
    rig.add("old", 9)
    rig.now_s = 12.0
    rig.add("young", 1)
    assert rig.queue.pop_request().request_id == "new-0"
    rig.queue.on_step_end()
    rig.add("new-2", 9)
    rig.add("new-3", 9)
    assert rig.pop_all() == ["old", "young", "new-1", "new-2", "new-3"]


def test_no_age_beats_a_priority_that_clients_gave():
    rig = Rig(max_wait_s=10.0)
    rig.add("old", 1)
    rig.now_s = 11.0
    rig.keys["urgent"] = (-1,)
    rig.queue.add_request(request("urgent"))
    assert rig.pop_all() == ["urgent", "old"]


def test_what_was_preempted_goes_before_any_age():
    rig = Rig(max_wait_s=10.0)
    rig.add("old", 9)
    rig.now_s = 11.0
    preempted = request("preempted")
    preempted.status = RequestStatus.PREEMPTED
    rig.keys["preempted"] = (0,)
    rig.queue.add_request(preempted)
    assert rig.pop_all() == ["preempted", "old"]


def test_age_starts_again_after_admission():
    rig = Rig(max_wait_s=10.0)
    rig.add("a", 9)
    rig.queue.pop_request()
    rig.queue.clear_overdue("a")
    rig.now_s = 100.0
    rig.add("a", 9)
    rig.add("b", 1)
    assert rig.queue.peek_request().request_id == "b"


def test_a_request_whose_load_failed_has_waited_since_it_arrived():
    rig = Rig(max_wait_s=10.0)
    rig.add("late", 1)
    rig.arrived_s["failed"], rig.now_s = 0.0, 9.0
    assert rig.queue.pop_request().request_id == "late"
    rig.add("later", 1)
    rig.now_s = 12.0
    rig.add("failed", 9)  # vLLM took it out when its load began
    assert rig.pop_all() == ["failed", "later"]


def test_requests_of_one_age_are_told_apart_by_their_keys():
    rig = Rig()
    for number in range(50):
        rig.add(f"r{number}", number)
    by_age = rig.queue._by_age._entries
    assert len(set(map(by_age.key, by_age))) == 50


def test_places_out_of_date_are_put_right_at_the_head():
    rig = Rig(max_wait_s=1e9)
    for key, name in enumerate("abcd"):
        rig.add(name, key)
    rig.moved = {"a": (0, 9), "b": (0, 8), "d": (0, 0)}
    assert rig.queue.peek_request().request_id == "c"
    assert rig.moved == {"d": (0, 0)}  # nobody else was looked at
    assert rig.pop_all() == ["c", "d", "b", "a"]


def test_newcomers_that_are_held_let_others_pass_until_the_next_step():
    rig = Rig()
    rig.newcomers = {"new", "newer"}
    for key, name in enumerate(("new", "a", "newer", "b")):
        rig.add(name, key)
    assert [r.request_id for r in rig.queue] == ["new", "a", "newer", "b"]
    skipped = rig.queue.pop_request()
    rig.queue.hold_scope = HoldScope.NEWCOMERS
    for name in ("a", "b"):
        assert rig.queue
        assert rig.queue.pop_request().request_id == name
    assert not rig.queue
    rig.queue.prepend_requests([skipped])
    assert (bool(rig.queue), len(rig.queue)) == (False, 2)
    rig.queue.on_step_end()
    rig.newcomers.clear()
    rig.queue.rekey("newer")  # its program has started
    assert rig.pop_all() == ["new", "newer"]


def test_those_that_cannot_start_keep_their_places_without_being_sorted_anew(
    monkeypatch,
):
    """Thousands may wait for a LoRA adapter: vLLM pops and puts back all in a step."""
    rig = Rig()
    for number in range(50):
        rig.add(f"{number}", number)
    moved = []
    for name in ("add", "remove"):
        monkeypatch.setattr(SortedKeyList, name, lambda *_: moved.append(_))
    skipped = [rig.queue.pop_request() for _ in range(50)]
    rig.queue.prepend_requests(reversed(skipped))
    rig.queue.on_step_end()
    assert not moved
    assert [r.request_id for r in rig.queue] == [f"{n}" for n in range(50)]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("apxrse"), st.integers(0, 9)), max_size=60))
def test_behaves_like_a_sorted_list(operations):
    rig = Rig(max_wait_s=1e9)
    model: dict[str, int] = {}
    for index, (operation, key) in enumerate(operations):
        name = f"{key}"
        if operation == "a":
            rig.add(name, key, index)
            model[name] = index
        elif operation == "p" and model:
            expected = min(model, key=lambda n: (int(n), model[n]))
            assert rig.queue.pop_request().request_id == expected
            del model[expected]
        elif operation == "x":
            rig.queue.remove_requests([request(name), request("ghost")])
            model.pop(name, None)
        elif operation == "r":
            rig.queue.rekey(name)
        elif operation == "s":  # those that cannot start come back in their places
            skipped = [rig.queue.pop_request() for _ in range(min(key, len(model)))]
            assert len(rig.queue) == len(model) - len(skipped)
            rig.queue.prepend_requests(skipped)
        elif operation == "e":
            rig.queue.on_step_end()
        order = sorted(model, key=lambda n: (int(n), model[n]))
        assert [r.request_id for r in rig.queue] == order
        assert len(rig.queue) == len(model)
