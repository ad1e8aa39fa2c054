"""Do the tests notice? Chosen lines are broken one at a time, each in a copy.

Every mutation names the test that must fail for it. The copy holds the package and
its tests; `conftest.py` in it makes sure that it, not this checkout, is imported.
Each takes some seconds: they are tried at night.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.changed import ROOT

TESTS_FAILED = 1  # exit statuses of pytest; broken imports have others
ALL_PASSED = 0

CONFTEST = """
from pathlib import Path
import ttlcache

here = Path(__file__).parent
assert Path(ttlcache.__file__).is_relative_to(here), f"imported {ttlcache.__file__}"
"""


@dataclass(frozen=True)
class Mutation:
    """Replace `original` in `file` of the package: `caught_by` in tests/core fails."""

    file: str
    original: str
    mutated: str
    caught_by: str

    def __str__(self) -> str:
        return f"{self.file}: {self.mutated.strip().splitlines()[0].strip()}"


def policy(file: str, original: str, mutated: str, test: str) -> Mutation:
    return Mutation(f"policies/{file}", original, mutated, f"test_policies_{test}")


MUTATIONS = [
    # between turns: progress of tools, and what recordings say of the gaps
    Mutation(
        "retention/ttl.py",
        "if decision.ttl_s > 0:",
        "if decision.ttl_s >= 0:",
        "test_control.py::test_an_eta_beyond_the_worth_releases_now",
    ),
    Mutation(
        "retention/ttl.py",
        "ttl_s=min(decision.ttl_s, left_s)",
        "ttl_s=decision.ttl_s",
        "test_control.py::test_max_ttl_bounds_the_whole_gap",
    ),
    Mutation(
        "analysis/hindsight.py",
        "return decided.price * ttl_s + decided.benefit_s",
        "return decided.price * ttl_s",
        "test_hindsight.py::test_known_costs",
    ),
    # policies: the argmax, its terms and its cold start
    policy(
        "cachettl.py",
        "best = int(values.argmax())",
        "best = int(values.argmin())",
        "paper.py::test_cachettl_by_hand",
    ),
    policy(
        "cachettl.py",
        "values -= gaps_s * float(records)",
        "values -= gaps_s",
        "paper.py::test_cachettl_by_hand",
    ),
    policy(
        "cachettl.py",
        "math.log(benefit_s) if",
        "math.log1p(benefit_s) if",
        "paper.py::test_cachettl_cold_start",
    ),
    policy(
        "cachettl.py",
        "bounded(delay_s * eta + recovery_s)",
        "bounded(delay_s + recovery_s)",
        "paper.py::test_cachettl_by_hand",
    ),
    policy(
        "cachettl.py",
        "eta = view.memoryfulness if sample is not None else 1.0",
        "eta = view.memoryfulness",
        "paper.py::test_cachettl_cold_start",
    ),
    policy(
        "cachettl.py",
        "if gaps.count() <= k:",
        "if gaps.count() < k:",
        "paper.py::test_cachettl_cold_start",
    ),
    policy(
        "base.py",
        "left_s = ttl_s - max(turn.waited_s, 0.0)",
        "left_s = ttl_s",
        "paper.py::test_cachettl_later_in_the_gap_keeps_its_plan",
    ),
    policy(
        "adaptive.py",
        "losses = held_s * (terms.price / terms.benefit_s)",
        "losses = held_s * (1.0 / terms.benefit_s)",
        "adaptive.py::test_idle_memory_is_free_and_scarce_memory_is_dear",
    ),
    policy(
        "adaptive.py",
        "curve.given_survival(turn.waited_s)",
        "curve.given_survival(0.0)",
        "adaptive.py::test_deciding_again_uses_what_the_wait_tells",
    ),
    # estimators
    Mutation(
        "estimators/survival.py",
        "- _count_below(censored, events)",
        "- 0",
        "test_policies_adaptive.py::test_deciding_again_uses_what_the_wait_tells"
        " test_estimators.py::test_kaplan_meier_equals_lifelines",
    ),
    Mutation(
        "estimators/survival.py",
        "values.searchsorted(bounds)",
        'values.searchsorted(bounds, side="right")',
        "test_estimators.py::test_kaplan_meier_by_hand",
    ),
    Mutation(
        "estimators/survival.py",
        "return -max(-1.0, min(1.0, corr))",
        "return max(-1.0, min(1.0, corr))",
        "test_estimators.py::test_eta_by_hand",
    ),
    # pins: who goes first, who expires when
    Mutation(
        "retention/pins.py",
        "(-pin.priority_class, *pin.rank,",
        "(-pin.priority_class, *(-n for n in pin.rank),",
        "test_pins.py::test_victims_are_the_latest_programs_first_and_awaited_pins_last",
    ),
    Mutation(
        "retention/pins.py",
        "                awaited.append(pin)",
        "                yield pin",
        "test_pins.py::test_victims_are_the_latest_programs_first_and_awaited_pins_last",
    ),
    Mutation(
        "retention/pins.py",
        "while deadlines and deadlines[0][0] <= now_s:",
        "while deadlines and deadlines[0][0] < now_s:",
        "test_pins.py::test_pins_expire_at_their_deadline_oldest_first",
    ),
    # reclaim
    Mutation(
        "retention/reclaim.py",
        "weaker = pin.rank > rank",
        "weaker = pin.rank >= rank",
        "test_fairness.py::test_branches_of_one_context_take_no_pins_from_each_other",
    ),
    Mutation(
        "retention/reclaim.py",
        "return pin.pin_id != own_pin_id and self.holder.is_freeable(pin.pin_id)",
        "return self.holder.is_freeable(pin.pin_id)",
        "test_reclaim.py::test_the_own_pin_goes_only_when_the_engine_is_stalled",
    ),
    Mutation(
        "retention/reclaim.py",
        "if self.holder.count_freeable(pin_ids, needed) < needed:",
        "if self.holder.count_freeable(pin_ids, needed) < 1:",
        "test_reclaim.py::test_what_pins_share_is_offered_once",
    ),
    # places in the order
    Mutation(
        "retention/reclaim.py",
        "(pin.is_awaited and not pin.quantum_used)",
        "pin.is_awaited",
        "test_fairness.py"
        "::test_a_used_up_programs_pin_gives_way_to_who_stands_before_it_even_if_held",
    ),
    Mutation(
        "scheduling/queue_order.py",
        "record.claim_counts = not place.is_used_up",
        "record.claim_counts = True",
        "test_fairness.py::test_a_used_up_program_stands_behind_who_came_meanwhile",
    ),
    # continuation and open turns
    Mutation(
        "programs/continuation.py",
        "key=lambda t: (t.num_hashes, t.token)",
        "key=lambda t: t.token",
        "test_continuation.py::test_the_longest_turn_wins_then_the_latest",
    ),
    Mutation(
        "programs/continuation.py",
        "if program.live_requests or not program.open_turns:",
        "if not program.open_turns:",
        "test_continuation.py"
        "::test_while_another_request_is_under_way_a_new_prompt_branches",
    ),
    Mutation(
        "programs/continuation.py",
        "alone = len(program.open_turns) == 1",
        "alone = True",
        "test_continuation.py"
        "::test_a_rewrite_beside_other_open_turns_leaves_the_unpinned_one_open",
    ),
    Mutation(
        "retention/open_turns.py",
        "pin.continued = True",
        "pin.continued = False",
        "test_turns.py::test_a_claimed_turn_is_over_and_a_second_branch_of_it_is_new",
    ),
    Mutation(
        "retention/open_turns.py",
        "max(pin.deadline_s, now_s + ttl_s)",
        "now_s + ttl_s",
        "test_turns.py::test_renewing_never_shortens_and_is_capped",
    ),
    Mutation(
        "retention/open_turns.py",
        "if not self._is_awaited(turn)]",
        "if turn]",
        "test_turns.py"
        "::test_turns_that_somebody_waits_for_do_not_count_against_the_bound",
    ),
    # retention
    Mutation(
        "retention/ttl.py",
        "self.config.max_ttl_s - waited_s",
        "self.config.max_ttl_s",
        "test_retention.py::test_all_in_all_no_pin_outlives_max_ttl",
    ),
    Mutation(
        "retention/ttl.py",
        "keep -= max(0, self._missing(finish, keep))",
        "keep -= max(0, self._missing(finish, 0))",
        "test_retention.py::test_room_made_by_blocks_of_its_own_is_no_room",
    ),
    # ordering and admission
    Mutation(
        "scheduling/admission.py",
        "growth += self._growth_context_blocks",
        "growth += 0.0",
        "test_admission.py::test_room_is_kept_for_half_of_what_is_still_to_come",
    ),
    Mutation(
        "scheduling/admission.py",
        "MAX_POOL_SHARE * pressure.pool_blocks,",
        "1.0 * pressure.pool_blocks,",
        "test_admission.py::test_half_of_the_pool_serves_whoever_comes",
    ),
    Mutation(
        "scheduling/admission.py",
        "if not program.live_requests and not pinned:",
        "if not pinned:",
        "test_admission.py::test_who_holds_no_memory_any_more_has_no_room",
    ),
    Mutation(
        "scheduling/ordering.py",
        "not turn.claimable,\n            turn.place_seq,",
        "turn.claimable,\n            turn.place_seq,",
        "test_ordering.py::test_order_of_service",
    ),
    Mutation(
        "scheduling/ordering.py",
        "turn.place_seq + self.REQUEST_WEIGHT * turn.turn_seq",
        "turn.place_seq",
        "test_ordering.py"
        "::test_the_older_a_program_the_more_newcomers_its_turn_lets_pass",
    ),
    Mutation(
        "scheduling/queue_order.py",
        "record.turn_seq = 0  #",
        "pass  #",
        "test_fairness.py"
        "::test_a_branch_that_waits_at_a_used_up_place_gets_a_new_turn_number",
    ),
    Mutation(
        "scheduling/queue_order.py",
        "max(record.place_seq, record.turn_seq)",
        "record.place_seq",
        "test_fairness.py::test_turns_count_for_their_tenant",
    ),
    Mutation(
        "retention/tier_record.py",
        "if record.lost_tokens:",
        "if False:",
        "test_reloads.py::test_what_a_return_found_below",
    ),
    Mutation(
        "retention/ttl.py",
        "if facts is None or facts.requested_ttl_s is not None:",
        "if facts is None:",
        "test_retention.py::test_a_clients_own_ttl_is_final",
    ),
    # hints
    Mutation(
        "programs/client_values.py",
        "elif _is_number(value) and 0 <= value <= sys.float_info.max:",
        "elif _is_number(value) and 0 < value <= sys.float_info.max:",
        "test_hints.py::test_limits_themselves_are_allowed",
    ),
    Mutation(
        "programs/client_values.py",
        '_UNIT_S[match[2] or "s"]',
        '_UNIT_S[match[2] or "ms"]',
        "test_hints.py::test_durations",
    ),
    # gaps: back-off, and whose gaps are the tools'
    Mutation(
        "estimators/gap_history.py",
        "with_censored=with_censored) > min_records:",
        "with_censored=with_censored) >= min_records:",
        "test_gaps.py::test_back_off_finds_the_finest_key_with_enough_records",
    ),
    Mutation(
        "estimators/gap_history.py",
        "if not is_human_gap(key):",
        "if True:",
        "test_gaps.py::test_human_gaps_stay_out_of_the_global_window",
    ),
    Mutation(
        "types.py",
        "return (self, GapKey(self.tool)) if self.executable else (self,)",
        "return (self,)",
        "test_gaps.py::test_a_gap_is_recorded_under_every_coarser_key",
    ),
    # costs
    Mutation(
        "estimators/costs.py",
        "b * (n * n - known * known)",
        "b * (n * n)",
        "test_costs.py::test_prefill_by_hand",
    ),
    Mutation(
        "controller.py",
        "max(step.start_s, self._step_ended_s)",
        "step.start_s",
        "test_step_fit.py::test_a_step_scheduled_early_begins_when_the_one_before_it_ends",
    ),
    Mutation(
        "estimators/step_fit.py",
        "scale = max(seconds, expected_s)",
        "scale = seconds",
        "test_step_fit.py::test_results_fetched_together_are_no_quick_step",
    ),
    Mutation(
        "estimators/costs.py",
        "1.0 + (running + 1.0) / waiting",
        "1.0 + running / waiting",
        "test_costs.py::test_memory_price_by_hand",
    ),
    Mutation(
        "estimators/costs.py",
        "pressure.wanted_blocks <= 0 and pressure.free_blocks >",
        "pressure.free_blocks >",
        "test_costs.py::test_memory_price_by_hand",
    ),
    # expected work
    Mutation(
        "scheduling/remaining_work.py",
        "at_risk = np.cumsum((ended + live)[::-1])[::-1]",
        "at_risk = np.cumsum(ended[::-1])[::-1]",
        "test_remaining_work.py::test_turns_left_with_programs_under_way",
    ),
    Mutation(
        "scheduling/remaining_work.py",
        "+ survival[longest] * longest",
        "+ 0 * survival[longest]",
        "test_remaining_work.py::test_turns_left_with_programs_under_way",
    ),
    Mutation(
        "scheduling/remaining_work.py",
        "max(work.turns - 1, 0) + PRIOR_TURNS",
        "work.turns + PRIOR_TURNS",
        "test_remaining_work.py::test_work_left_by_hand",
    ),
    Mutation(
        "scheduling/ordering.py",
        "return (turn.place_seq + turn.delay_places,)",
        "return (turn.place_seq,)",
        "test_expected_finish.py::test_a_newcomer_takes_the_pin_of_more_work",
    ),
    # shell commands
    Mutation(
        "toolcalls/shell.py",
        'return OTHER if word.strip("/")',
        'return name if word.strip("/")',
        "test_toolcalls_shell.py::test_nothing_of_a_command_is_in_its_key",
    ),
    Mutation(
        "toolcalls/shell.py",
        "found[0] >= best[0]",
        "found[0] > best[0]",
        "test_toolcalls_shell.py::test_command_gives_this_key",
    ),
    # patience and whole victims
    Mutation(
        "retention/reclaim.py",
        "min(pin.stall_until_s, pin.policy_deadline_s)",
        "pin.policy_deadline_s",
        "test_patience.py::test_patience_ends",
    ),
    Mutation(
        "retention/reclaim.py",
        "if pin.is_awaited or pin.quantum_used:",
        "if pin.quantum_used:",
        "test_patience.py::test_no_patience_for_whom_waits_already",
    ),
    Mutation(
        "retention/reclaim.py",
        "if pin.kv_blocks - drop_blocks < max(1, pin.min_blocks):",
        "if drop_blocks >= pin.kv_blocks:",
        "test_patience.py::test_a_whole_pin_goes_as_a_whole",
    ),
    Mutation(
        "retention/reclaim.py",
        "if pin.kv_blocks - drop_blocks < max(1, pin.min_blocks):",
        "if pin.min_blocks or drop_blocks >= pin.kv_blocks:",
        "test_patience.py::test_a_pin_gives_some_blocks_before_it_goes_as_a_whole",
    ),
    Mutation(
        "retention/reclaim.py",
        "                    self._note_stall(spared)",
        "                    pass",
        "test_patience.py::test_the_time_stood_still_counts_against_the_quantum",
    ),
    # identity by prefix
    Mutation(
        "programs/prefix_index.py",
        "stop = min(start + self._block_tokens, num_tokens) - 1",
        "stop = min(start + self._block_tokens, num_tokens + 1) - 1",
        "test_prefixes.py::test_the_same_prompt_again_is_another_program",
    ),
]


def make_copy(folder: Path) -> Path:
    """The package and its tests, with a guard on what is imported."""
    ignore = shutil.ignore_patterns("__pycache__", "test_mutations.py")
    shutil.copytree(ROOT / "ttlcache", folder / "ttlcache", ignore=ignore)
    shutil.copytree(ROOT / "tests/core", folder / "tests/core", ignore=ignore)
    shutil.copy(ROOT / "tests/curves.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "conftest.py").write_text(CONFTEST)
    return folder


def run_tests(folder: Path, selections: list[str]) -> tuple[int, str]:
    """Exit status and end of the output of pytest inside the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ids = [
        f"tests/core/{each}" for selection in selections for each in selection.split()
    ]
    done = subprocess.run(
        [*command, *ids],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def try_mutation(folder: Path, mutation: Mutation) -> tuple[int, str]:
    source = make_copy(folder) / "ttlcache" / mutation.file
    text = source.read_text()
    source.write_text(text.replace(mutation.original, mutation.mutated))
    try:
        return run_tests(folder, [mutation.caught_by])
    finally:
        shutil.rmtree(folder)


def test_every_snippet_is_in_its_file_once() -> None:
    for mutation in MUTATIONS:
        text = (ROOT / "ttlcache" / mutation.file).read_text()
        assert text.count(mutation.original) == 1, f"update the list: {mutation}"
        assert mutation.original != mutation.mutated


@pytest.mark.nightly
def test_unchanged_the_copy_passes(tmp_path: Path) -> None:
    selections = sorted({mutation.caught_by for mutation in MUTATIONS})
    status, output = run_tests(make_copy(tmp_path), selections)
    assert status == ALL_PASSED, output


@pytest.mark.nightly
def test_a_copy_without_the_package_is_refused(tmp_path: Path) -> None:
    # Then the editable install would be imported, and the mutation tested nowhere.
    shutil.rmtree(make_copy(tmp_path) / "ttlcache")
    status, output = run_tests(tmp_path, ["test_pins.py::test_no_pin_has_no_pin"])
    assert status not in (ALL_PASSED, TESTS_FAILED)
    assert "imported" in output


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_mutation_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    status, output = try_mutation(tmp_path / "copy", mutation)
    assert status == TESTS_FAILED, f"survived: {mutation}\n{output}"
