"""Shell commands as agents write them, and the program that dominates each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
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


def rows() -> list[object]:
    table = {"chain": CHAINS, "pipe": PIPES, "wrapped": WRAPPED, "word": WORDS}
    table["odd"] = ODD
    return [
        pytest.param(*row, id=f"{group}-{row[0][:40]!r}")
        for group, group_rows in table.items()
        for row in group_rows
    ]


@pytest.mark.parametrize(("command", "program"), rows())
def test_command_gives_this_key(command: str, program: str) -> None:
    assert shell_key(command) == GapKey("bash", program)


@pytest.mark.parametrize("marker", ["COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"])
@pytest.mark.parametrize("form", ["echo {}", "cd x && echo '{}'", 'bash -c "echo {}"'])
def test_final_marker_ends_the_program(form: str, marker: str) -> None:
    assert shell_key(form.format(marker)) == FINAL_GAP


def test_marker_in_a_file_is_no_end() -> None:
    command = "grep -r COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT ."
    assert shell_key(command) == GapKey("bash", "grep")


def test_tool_name_is_kept() -> None:
    assert shell_key("make", "run_command") == GapKey("run_command", "make")


SECRETS = [
    *("sshpass -p hunter2 ssh root@db.acme.com", "hunter2", "./hunter2 --now"),
    *("mysql -u root -phunter2 acme", "docker login -u acme -p hunter2 acme.io"),
    *("curl -u acme:hunter2 https://acme.com", "TOKEN=hunter2 ./acme.hunter2 up"),
    *("passwd acme hunter2", "git clone https://acme:hunter2@github.com/acme/hunter2"),
    *("npm run hunter2", "make hunter2", "python -m hunter2", "python3 hunter2 acme"),
    *("sudo hunter2", "bash -c 'hunter2 acme'", "npx @acme/hunter2@2 acme"),
    *("kubectl create secret generic acme --from-literal=p=hunter2", "@hunter2"),
    *("cat a.hunt2", "uv run hunter2", "conda run -n acme hunter2", "hunter2.sh"),
    *("expect <<E\nhunter2\nE\nhunter2", "git hunter2", "python hunter2.acme"),
]


def words_of(key: GapKey) -> set[str]:
    """The words that are not the tool's."""
    if key.tool == PARALLEL_TOOL:
        return set(key.executable.split("+"))
    return {key.executable} - {""}


@pytest.mark.parametrize("command", SECRETS)
def test_nothing_of_a_command_is_in_its_key(command: str) -> None:
    key = str(shell_key(command))
    assert not any(secret in key for secret in ("hunt", "acme"))


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
def test_every_word_of_a_key_is_of_the_tables(tokens: list[str], spaced: bool) -> None:
    command = (" " if spaced else "").join(tokens)
    known = PROGRAMS | {OTHER}
    for key in (shell_key(command), key_for_tool("bash", {"command": command})):
        assert words_of(key) <= known
    fenced = detect(f"```bash\n{command}\n```")
    if fenced is not None and fenced.tool == "bash":
        assert words_of(fenced) <= known
