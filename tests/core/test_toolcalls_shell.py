"""Shell commands as agents write them, and the program that dominates each."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttlcache.toolcalls import detect, key_for_tool, shell_key
from ttlcache.toolcalls.shell import OTHER, PROGRAMS
from ttlcache.types import FINAL_GAP, PARALLEL_TOOL, GapKey

TABLE = Path(__file__).with_name("shell_commands.txt").read_text("utf-8").splitlines()
#: (command, program)
COMMANDS = [
    (command.encode().decode("unicode_escape"), "" if program == "none" else program)
    for program, arrow, command in (line.partition(" <- ") for line in TABLE)
    if arrow
]


@pytest.mark.parametrize(("command", "program"), [*COMMANDS, ("", "")])
def test_command_gives_this_key(command, program):
    assert shell_key(command) == GapKey("bash", program)


MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (f"echo {MARKER}", FINAL_GAP),
        (f"cd x && echo '{MARKER}'", FINAL_GAP),
        (f'bash -c "echo {MARKER}"', FINAL_GAP),
        (f"grep -r {MARKER} .", GapKey("bash", "grep")),
    ],
)
def test_a_final_marker_that_is_printed_ends_the_program(command, key):
    assert shell_key(command) == key


def words_of(key):
    """The words that are not the tool's."""
    if key.tool == PARALLEL_TOOL:
        return set(key.executable.split("+"))
    return {key.executable} - {""}


SCRIPT_TOKENS = st.one_of(
    st.sampled_from(
        [
            *list("|;&(){}`'<>-=/.:@#"),
            *("&&", "$(", "<<", "-c", "-m", "-p", "run", "\t"),
            *('"', " ", "\n", "\\", "sudo ", "bash -c ", "python ", "npm run "),
            *("git ", "uv run ", "docker exec ", "timeout 5 ", "npx ", "env A="),
        ]
    ),
    st.text(max_size=12),
    st.sampled_from(sorted(PROGRAMS)),
)


@settings(max_examples=500)
@given(st.lists(SCRIPT_TOKENS, max_size=20), st.booleans())
@example(["sshpass -p hunter2 ssh root@db.acme.com"], False)
@example(["git clone https://acme:hunter2@github.com/acme/hunter2"], False)
@example(["bash -c 'hunter2 acme'; npx @acme/hunter2@2; python -m hunter2"], False)
def test_every_word_of_a_key_is_of_the_tables(tokens, spaced):
    command = (" " if spaced else "").join(tokens)
    known = PROGRAMS | {OTHER}
    for key in (shell_key(command), key_for_tool("bash", {"command": command})):
        assert words_of(key) <= known
    fenced = detect(f"```bash\n{command}\n```")
    if fenced is not None and fenced.tool == "bash":
        assert words_of(fenced) <= known
