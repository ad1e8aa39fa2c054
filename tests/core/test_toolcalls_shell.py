"""Shell commands as agents write them, and the program that dominates each."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttlcache.toolcalls import detect, key_for_tool, shell_key
from ttlcache.toolcalls.shell import OTHER, PROGRAMS
from ttlcache.types import FINAL_GAP, PARALLEL_TOOL, GapKey

# command, program
CHAINS = [
    ("pytest", "pytest"),
    ("cd /repo && pytest", "pytest"),
    ("cd /repo || exit 1\nmake", "make"),
    ("export A=1 && source .venv/bin/activate && npm test", "npm"),
    ("conda activate env && python a.py", "python"),
    ("set -e; echo start; cargo build; echo done", "cargo"),
    ("pytest; ls", "pytest"),
    ("cd /repo", "cd"),
    ("cd /repo && ls", "ls"),
    ("echo hi", "echo"),
    ("mkdir b && cd b && cmake .. && make -j8", "make"),
    ("(cd a && make)", "make"),
    ("if [ -f Makefile ]; then make test; fi", "make"),
    ("for f in *.py; do python $f; done", "python"),
    ("while true; do curl -s x; sleep 1; done", "sleep"),
    ("! make", "make"),
    ("./server & pytest", "pytest"),
    ("pytest & ls", "ls"),
    ("python s.py > log 2>&1 &", "python"),
    ("make \\\n  -j4 \\\n  test", "make"),
    ("# run it\nmake test # now", "make"),
    ("pytest &> log.txt", "pytest"),
]
PIPES = [
    ("pytest | tail -5", "pytest"),
    ("cat a | grep b", "grep"),
    ("echo y | apt-get install x", "apt-get"),
    ("cat in.txt | ./solve", "*"),
    ("make |& head", "make"),
    ("find . -name '*.py' | xargs ruff check", "ruff"),
]
WRAPPED = [
    ("timeout 30 pytest", "pytest"),
    ("timeout --signal=KILL 30 make", "make"),
    ("sudo -u app npm start", "npm"),
    ("time make", "make"),
    ("nohup python s.py", "python"),
    ("env A=b C=d make", "make"),
    ("A=$(pwd) make", "make"),
    ("timeout 9 sudo -E env A=b nice make test", "make"),
    ("env", "env"),
    ("A=b", ""),
    ('bash -c "cd x && make test"', "make"),
    ("bash -lc 'npm test'", "npm"),
    ('bash -c "python -c \\"print(1)\\"" ', "python"),
    ("bash run.sh", "bash"),
    ("bash -c 'bash -c \"pytest\"'", "pytest"),
    ("uv run --with x -p 3.12 pytest -q", "pytest"),
    ("uv run a.py", "python"),
    ("uv run -m pytest", "pytest"),
    ("uv sync", "uv"),
    ("poetry install", "poetry"),
    ("coverage run -m pytest", "pytest"),
    ("conda run -n env make", "make"),
    ("npx -y jest --ci", "jest"),
    ("npx prettier@3 --check .", "prettier"),
    ("docker exec -u app -w /x web bash -c 'make test'", "make"),
    ("docker compose exec web pytest", "pytest"),
    ("sshpass -p x ssh a@b", "ssh"),
]
WORDS = [
    ("/usr/bin/python3 /tmp/a1b2.py --n 3", "python"),
    ("python -c 'print(1)'", "python"),
    ("python - <<'E'\nprint(1)\nE", "python"),
    ("python3 -m pip install -r r.txt", "pip"),
    ("python -W ignore -m pytest a.py", "pytest"),
    ("python -m", "python"),
    ("pytest tests/test_a.py::test_b[x.y]", "pytest"),
    ("git -C /x clone u", "git"),
    ("./gradlew test", "gradlew"),
    ("./run_tests.sh", "bash"),
    ("./manage.py migrate", "python"),
    ("python -m acme.cli run", "python"),
    ("gcc-12 -O2 a.c", "gcc"),
    ("cat notes.hunter2", "cat"),
]
ODD = [
    ("", ""),
    ("   \n\t", ""),
    ("# only a comment", ""),
    ("echo it's && make", "make"),
    ("echo 'it && make", "make"),
    ('grep "a && make', "make"),
    ("echo 'a && b; c' && make", "make"),
    ("make $(cat <<E", "make"),
    ("cat > a.py <<'EOF'\npytest\nEOF", "cat"),
    ("cat > a.py <<EOF && make\nnpm test\nEOF\n", "make"),
    ("cat <<A <<B\nx\nA\npytest\nB\nmake", "make"),
    ("cat <<-EOF\n\tpytest\n\tEOF\nmake", "make"),
    ("cat <<EOF\npytest", "cat"),
    ("cat <<< pytest; make", "make"),
    ("&& || ;", ""),
    ("| make", "make"),
    ("/", ""),
    ("C-c", ""),
    ("ma\x00ke\x1b[0m te\x07st", "*"),
]


@pytest.mark.parametrize(
    ("command", "program"), [*CHAINS, *PIPES, *WRAPPED, *WORDS, *ODD]
)
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
