from __future__ import annotations

from ttlcache.programs.model import Program
from ttlcache.programs.places import Place
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.testing import chain_hashes

BLOCK = 4
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks that all programs share


PROGRAMS = {}  # by number


def make_program(label):
    number = len(PROGRAMS) + 1
    PROGRAMS[number] = Program(("", label), place=Place(number))
    return PROGRAMS[number]


def live(number):
    program = PROGRAMS[number]
    return None if program.ended else program


def remember(index, program, tokens):
    hashes = chain_hashes(tokens, BLOCK)
    index.remember(program.place.seq, hashes, len(tokens), lambda i, j: tokens[i:j])


def find(index, tokens):
    hashes = chain_hashes(tokens, BLOCK)
    return index.find(hashes, len(tokens), lambda i, j: tokens[i:j], live)


def test_a_prompt_that_goes_on_finds_its_program():
    index, a = PrefixIndex(BLOCK), make_program("A")
    remember(index, a, [*SYSTEM, 10, 11])
    assert find(index, [*SYSTEM, 10, 11, 12]) is a
    assert find(index, [*SYSTEM, *range(10, 40)]) is a


def test_a_shared_system_prompt_is_not_enough():
    index, a = PrefixIndex(BLOCK), make_program("A")
    remember(index, a, [*SYSTEM, 10, 11])
    assert find(index, [*SYSTEM, 10, 99, 12]) is None
    assert find(index, [*SYSTEM, 10]) is None
    assert find(index, [9, *SYSTEM, 10, 11, 12]) is None


def test_the_same_prompt_again_is_another_program():
    index, a = PrefixIndex(BLOCK), make_program("A")
    remember(index, a, SYSTEM)
    assert find(index, SYSTEM) is None
    assert find(index, [*SYSTEM, 9]) is a


def test_programs_differ_by_the_tokens_behind_their_last_block():
    index, a, b = PrefixIndex(BLOCK), make_program("A"), make_program("B")
    remember(index, a, [*SYSTEM, 10])
    remember(index, b, [*SYSTEM, 20])
    assert find(index, [*SYSTEM, 10, 0]) is a
    assert find(index, [*SYSTEM, 20, 0]) is b


def test_the_longest_context_wins_then_the_latest():
    index, a, b, c = PrefixIndex(BLOCK), *map(make_program, "ABC")
    remember(index, a, SYSTEM)
    remember(index, b, SYSTEM[:4])
    assert find(index, [*SYSTEM, 9]) is a
    remember(index, c, SYSTEM)
    assert find(index, [*SYSTEM, 9]) is c


def test_an_ended_program_is_not_found_again():
    index, a, b = PrefixIndex(BLOCK), make_program("A"), make_program("B")
    remember(index, a, SYSTEM[:4])
    remember(index, b, SYSTEM)
    b.ended = True
    assert find(index, [*SYSTEM, 9]) is a


def test_ended_programs_do_not_push_live_ones_out():
    # Scenario:
    #   1. A live program is remembered behind a common system prompt.
    #   2. Twenty others come and end behind the same prompt.
    #   3. The live one still finds itself.
    index, one = PrefixIndex(BLOCK), make_program("live")
    remember(index, one, [*SYSTEM, 10])
    for number in range(20):
        other = make_program(str(number))
        remember(index, other, [*SYSTEM, 100 + number])
        other.ended = True
    assert find(index, [*SYSTEM, 10, 11]) is one


def test_many_programs_behind_one_block_are_all_told_apart():
    # Scenario: twenty anonymous programs share their last full block. They differ
    # in the tokens behind it, some in how many there are.
    index = PrefixIndex(BLOCK)
    tails = [[100 + number, 7][: 1 + number % 2] for number in range(20)]
    programs = [make_program(str(number)) for number in range(20)]
    for tail, program in zip(tails, programs, strict=True):
        remember(index, program, [*SYSTEM, *tail])
    assert len(index) == 20
    for tail, program in zip(tails, programs, strict=True):
        assert find(index, [*SYSTEM, *tail, 0]) is program
    assert find(index, [*SYSTEM, 99, 0]) is None


def test_points_behind_one_block_are_bounded_oldest_first():
    index = PrefixIndex(BLOCK, capacity=8)
    programs = [make_program(str(number)) for number in range(9)]
    for number, program in enumerate(programs):
        remember(index, program, [*SYSTEM, 100 + number])
    assert len(index) == 8
    assert find(index, [*SYSTEM, 100, 0]) is None
    for number in range(1, 9):
        assert find(index, [*SYSTEM, 100 + number, 0]) is programs[number]


def test_the_bound_holds_over_tails_of_all_lengths():
    # Scenario:
    #   1. Tails of one, two and three tokens behind one block, room for three.
    #   2. A fourth: the oldest length goes, and its empty place with it.
    #   3. Another block: the old one gives way, context by context.
    index, programs = PrefixIndex(BLOCK, capacity=3), list(map(make_program, "ABCDEFG"))
    for length in (1, 2, 3):
        remember(index, programs[length], [*SYSTEM, *[100 + length] * length])
    remember(index, programs[4], [*SYSTEM, 50, 50])
    assert len(index) == 3
    assert find(index, [*SYSTEM, 101, 0]) is None
    assert find(index, [*SYSTEM, 102, 102, 0]) is programs[2]
    assert find(index, [*SYSTEM, 50, 50, 0]) is programs[4]
    for number in (1, 2, 3):
        remember(index, programs[number], [9, 9, 9, 9, number])
    assert len(index) == 3
    assert find(index, [*SYSTEM, 50, 50, 0]) is None
    assert find(index, [9, 9, 9, 9, 1, 0]) is programs[1]


def test_remembering_twice_is_remembering_once():
    index, programs = PrefixIndex(BLOCK), [make_program(str(n)) for n in range(8)]
    for number, program in enumerate(programs):
        remember(index, program, [*SYSTEM, 100 + number])
    remember(index, programs[0], [*SYSTEM, 100])
    assert find(index, [*SYSTEM, 100, 0]) is programs[0]
    assert find(index, [*SYSTEM, 101, 0]) is programs[1]


def test_the_index_is_bounded_oldest_first():
    index, a, b = PrefixIndex(BLOCK, capacity=2), make_program("A"), make_program("B")
    remember(index, a, [1] * 4)
    remember(index, a, [2] * 4)
    remember(index, a, [1] * 4)  # fresh again
    remember(index, b, [3] * 4)
    assert len(index) == 2
    assert find(index, [1] * 5) is a
    assert find(index, [2] * 5) is None
    assert find(index, [3] * 5) is b


def test_contexts_without_a_full_block_or_without_its_hash_are_left_out():
    index, a = PrefixIndex(BLOCK), make_program("A")
    remember(index, a, [1, 2, 3])
    index.remember(a.place.seq, [], 8, lambda i, j: SYSTEM[i:j])
    assert len(index) == 0
    assert find(index, [1, 2, 3, 4]) is None


def test_an_ended_programs_contexts_are_passed_over_unread():
    index = PrefixIndex(BLOCK)
    remember(index, make_program("A"), [*SYSTEM, 1])
    hashes = chain_hashes(tuple(SYSTEM), BLOCK)

    def tokens(start, stop):
        raise AssertionError("read in vain")

    assert index.find(hashes, len(SYSTEM) + 2, tokens, lambda number: None) is None
