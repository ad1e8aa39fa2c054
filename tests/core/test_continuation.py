import pytest

from tests.core.stories import make_program
from tests.fake_engine import chain_hashes
from ttlcache.programs.continuation import Relation, relate
from ttlcache.programs.model import Turn
from ttlcache.programs.prompt_fingerprint import GenerationPrompt, PromptFingerprint
from ttlcache.types import Arrival, GapKey, Hints

BLOCK = 2
TEMPLATE = 3  # tokens with which a prompt ends here
CONTINUES, DROPS_OUTPUT, SUPERSEDES, BRANCHES = Relation


def make_turn(tokens, *, gap_id=1, tool="search", pinned=True, prompt_tokens=0):
    hashes = chain_hashes(tokens, BLOCK)
    return Turn(
        gap_id=gap_id,
        finish_s=0.0,
        gap_key=GapKey(tool),
        context_tokens=len(tokens),
        num_hashes=len(hashes),
        last_hash=hashes[-1] if hashes else b"",
        prompt_fingerprint=PromptFingerprint.of(
            hashes,
            slice_of(tokens),
            prompt_tokens - TEMPLATE,
            BLOCK,
        ),
        hashes=hashes if pinned else (),
    )


def slice_of(tokens):
    return lambda start, stop: tokens[start:stop]


def relation_of(program, prompt):
    hashes = chain_hashes(prompt, BLOCK)
    arrival = Arrival("r", len(prompt), hashes, slice_of(prompt), Hints())
    return relate(program, arrival, BLOCK)


@pytest.mark.parametrize(
    ("turn", "prompt", "relation", "shared"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], CONTINUES, 2),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], CONTINUES, 2),
        ([1, 2, 3, 4], [1, 2, 3, 4], CONTINUES, 2),
        # A context below a block goes by length.
        ([1], [1], CONTINUES, 0),
        ([1], [], SUPERSEDES, None),
        # Histories that were shortened or rewritten.
        ([1, 2, 3, 4], [1, 2, 3], SUPERSEDES, 1),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4], SUPERSEDES, 2),
        ([1, 2, 3, 4], [1, 2, 3, 9, 5, 6], SUPERSEDES, 1),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9, 9], SUPERSEDES, 2),
        # Nothing is shared.
        ([1, 2, 3, 4], [9, 2, 3, 4, 5, 6], BRANCHES, None),
        ([1, 2, 3, 4], [9, 9], BRANCHES, None),
    ],
)
def test_a_prompt_after_one_pinned_turn(turn, prompt, relation, shared):
    program = make_program(1, make_turn(turn))
    found = relation_of(program, prompt)
    assert (found.relation, found.shared_blocks) == (relation, shared)
    assert found.turn is (None if relation is BRANCHES else program.awaited_turns[0])


def test_the_longest_turn_wins_then_the_latest():
    short, long = make_turn([1, 2], gap_id=2), make_turn([1, 2, 3, 4], gap_id=1)
    assert relation_of(make_program(1, long, short), [1, 2, 3, 4, 5]).turn is long
    first, second = make_turn([1, 2], gap_id=1), make_turn([1, 2], gap_id=2)
    assert relation_of(make_program(1, second, first), [1, 2, 3]).turn is second


def test_while_another_request_is_under_way_a_new_prompt_branches():
    program = make_program(1, make_turn([1, 2, 3, 4]))
    program.live_requests = 1
    assert relation_of(program, [1, 2, 9, 9]).relation is BRANCHES


def test_a_rewrite_beside_other_open_turns_leaves_the_unpinned_one_open():
    turns = [make_turn([n, n, n, n], gap_id=n, pinned=False) for n in (1, 2)]
    assert relation_of(make_program(1, *turns), [9, 9]).relation is BRANCHES


# --- clients that drop what a turn put out ------------------------------------

PROMPT = [1, 2, 3, *[7] * TEMPLATE]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(
    ("prompt", "relation"),
    [
        ([*PROMPT, *[90] * 6], DROPS_OUTPUT),
        ([*PROMPT, *[90] * 5], SUPERSEDES),  # maybe no more than a template's end
        ([*PROMPT[:4], *[90] * 9], DROPS_OUTPUT),  # without the template's `<think>`
        (PROMPT, SUPERSEDES),  # a retry
        ([*PROMPT[:3], 7, 7], SUPERSEDES),
        ([*PROMPT[:2], *[90] * 10], SUPERSEDES),  # another question, the same system
        ([*PROMPT, 5, 6, 90, 91], CONTINUES),
    ],
)
def test_a_prompt_that_extends_the_last_prompt(prompt, relation, pinned):
    turn = make_turn([*PROMPT, 5, 6], prompt_tokens=len(PROMPT), pinned=pinned)
    found = relation_of(make_program(1, turn), prompt)
    assert (found.relation, found.turn) == (relation, turn)
    if relation is DROPS_OUTPUT:
        assert 1 <= found.shared_blocks <= len(PROMPT) // BLOCK


def test_a_sub_agent_may_begin_with_its_parents_prompt():
    turn = make_turn([*PROMPT, 5, 6], tool="Task", prompt_tokens=len(PROMPT))
    prompt = [*PROMPT, *[90] * 9]
    assert relation_of(make_program(1, turn), prompt).relation is BRANCHES


def test_the_longest_prompt_wins_and_none_beside_another_request():
    def turn(tokens, number):
        return make_turn([*tokens, 5, 6], gap_id=number, prompt_tokens=len(tokens))

    long, short = turn([1, 2, 3, 4, 5, 6, 7, 7, 7], 1), turn(PROMPT, 2)
    program = make_program(1, long, short)
    prompt = [1, 2, 3, 4, 5, 6, *[90] * 9]
    assert relation_of(program, prompt).turn is long
    program.live_requests = 1
    assert relation_of(program, prompt).relation is BRANCHES


def test_a_prompt_below_a_block_is_extended_by_none():
    assert PromptFingerprint.of([], slice_of([1]), 1, BLOCK) is None
    turn = make_turn([1, 2, 3, 4, 5, 6], prompt_tokens=3)
    assert relation_of(make_program(1, turn), [1, 2, 9, 9]).relation is SUPERSEDES


def test_the_template_is_what_different_prompts_end_with():
    prompts = GenerationPrompt()

    def cut(*tokens):
        arrival = Arrival("r", len(tokens), [], slice_of(tokens), Hints())
        return len(tokens) - prompts.stable_tokens(arrival)

    for said in (1, 1, 2, 1, 2, 1, 3):
        assert cut(*[said] * 10, 7, 7, 7, 7) == 0
    assert cut(*[4] * 10, 7, 7, 7, 7) == 4
    assert {cut(*range(said, said + 10)) for said in range(100)} == {0}
    assert cut(*[1] * 10, 7, 7, 7, 7) == 4
