import pytest

from tests.fake_engine import chain_hashes
from ttlcache.programs.fair_queueing import Place
from ttlcache.programs.model import Program
from ttlcache.programs.prefix_index import PrefixIndex

BLOCK = 4
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks that all programs share


class Index:
    """Contexts of programs A, B, …"""

    def __init__(self, capacity=1000, **contexts):
        self.index = PrefixIndex(BLOCK, capacity)
        self.programs = {}
        for label, tokens in contexts.items():
            self.remember(label, tokens)

    def __len__(self):
        return len(self.index)

    def remember(self, label, tokens):
        if label not in self.programs:
            number = len(self.programs) + 1
            self.programs[label] = Program(("", label), place=Place(number))
        hashes, number = chain_hashes(tokens, BLOCK), self.programs[label].place.seq
        self.index.remember(number, hashes, len(tokens), lambda i, j: tokens[i:j])

    def live(self, number):
        program = list(self.programs.values())[number - 1]
        return None if program.ended else program

    def find(self, tokens):
        """The program's label."""
        found = self.index.find(
            chain_hashes(tokens, BLOCK),
            len(tokens),
            lambda i, j: tokens[i:j],
            self.live,
        )
        return found and found.program_id


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ([*SYSTEM, 10, 11, 12], "A"),
        ([*SYSTEM, *range(10, 40)], "A"),
        ([*SYSTEM, 20, 0], "B"),
        # A shared system prompt is not enough.
        ([*SYSTEM, 10, 99, 12], None),
        ([*SYSTEM, 10], None),
        ([9, *SYSTEM, 10, 11, 12], None),
    ],
)
def test_a_prompt_that_goes_on_finds_its_program(prompt, label):
    assert Index(A=[*SYSTEM, 10, 11], B=[*SYSTEM, 20]).find(prompt) == label


def test_the_same_prompt_again_is_another_program():
    index = Index(A=SYSTEM)
    assert index.find(SYSTEM) is None
    assert index.find([*SYSTEM, 9]) == "A"


def test_the_longest_context_wins_then_the_latest():
    index = Index(A=SYSTEM, B=SYSTEM[:4])
    assert index.find([*SYSTEM, 9]) == "A"
    index.remember("C", SYSTEM)
    assert index.find([*SYSTEM, 9]) == "C"
    index.programs["C"].ended = True
    assert index.find([*SYSTEM, 9]) == "B"


def test_many_programs_behind_one_block_are_all_told_apart():
    # Scenario: twenty anonymous programs share their last full block. They differ
    # in the tokens behind it, some in how many there are. Twenty others have ended.
    contexts = {f"p{n}": [*SYSTEM, *[100 + n, 7][: 1 + n % 2]] for n in range(20)}
    index = Index(**contexts)
    assert len(index) == 20
    for number in range(20):
        index.remember(f"over{number}", [*SYSTEM, 200 + number])
        index.programs[f"over{number}"].ended = True
    for label, context in contexts.items():
        assert index.find([*context, 0]) == label
    assert index.find([*SYSTEM, 99, 0, 0]) is None
    assert index.find([*SYSTEM, 200, 0]) is None


def test_the_bound_holds_over_tails_of_all_lengths():
    # Scenario:
    #   1. Tails of one, two and three tokens behind one block, room for three.
    #   2. A fourth: the oldest length goes, and its empty place with it.
    #   3. Another block: the old one gives way, context by context.
    index = Index(3, A=[*SYSTEM, 101], B=[*SYSTEM, 102, 102], C=[*SYSTEM, *[103] * 3])
    index.remember("D", [*SYSTEM, 50, 50])
    assert len(index) == 3
    assert index.find([*SYSTEM, 101, 0]) is None
    assert index.find([*SYSTEM, 102, 102, 0]) == "B"
    assert index.find([*SYSTEM, 50, 50, 0]) == "D"
    for number, label in enumerate("ABC"):
        index.remember(label, [9, 9, 9, 9, number])
    assert len(index) == 3
    assert index.find([*SYSTEM, 50, 50, 0]) is None
    assert index.find([9, 9, 9, 9, 0, 0]) == "A"


def test_the_index_is_bounded_oldest_first():
    index = Index(2, A=[1] * 4)
    index.remember("A", [2] * 4)
    index.remember("A", [1] * 4)  # fresh again
    index.remember("B", [3] * 4)
    assert len(index) == 2
    assert index.find([1] * 5) == "A"
    assert index.find([2] * 5) is None
    assert index.find([3] * 5) == "B"


def test_contexts_without_a_full_block_or_without_its_hash_are_left_out():
    index = Index(A=[1, 2, 3])
    index.index.remember(1, [], 8, lambda i, j: SYSTEM[i:j])
    assert len(index) == 0
    assert index.find([1, 2, 3, 4]) is None
