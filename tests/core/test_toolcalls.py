"""Outputs as agents and models write them, and the gap key of each."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache.toolcalls import SCAN_LIMIT, detect, shell_key
from ttlcache.types import APPROVAL_GAP, FINAL_GAP, PARALLEL_TOOL, GapKey

# DeepSeek's markers: full-width bars and U+2581.
BEGINS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"
END = "<\uff5ctool\u2581call\u2581end\uff5c>"
ENDS = "<\uff5ctool\u2581calls\u2581end\uff5c>"


def key(*parts: str) -> GapKey:
    return GapKey(*parts)


def both(*tools: str) -> GapKey:
    return GapKey(PARALLEL_TOOL, "+".join(tools))


def fence(body: str, language: str = "bash") -> str:
    return f"THOUGHT: let me look.\n\n```{language}\n{body}\n```\n"


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


Row = tuple[str, str, GapKey | None]

PROSE: list[Row] = [
    ("empty", "", None),
    ("blank", " \n\n\t", None),
    ("answer", "The bug is fixed: the index was off by one.", None),
    ("name-without-arguments", 'The file has {"name": "bash"} in it.', None),
    ("package-json", '{"name": "web", "version": "1.0.0", "private": true}', None),
    ("name-is-no-string", '{"name": 7, "arguments": {}}', None),
    ("blank-name", '{"name": " ", "arguments": {}}', None),
    (
        "tool-definition",
        '{"type": "function", "function": {"name": "bash", "description": "runs",'
        ' "parameters": {"type": "object", "properties": {"command": {}}}}}',
        None,
    ),
    (
        "bare-definition",
        '{"name": "bash", "parameters": {"type": "object", "properties": {}}}',
        None,
    ),
    ("markdown-link", "[see the docs](https://example.com/a(b))", None),
    ("python-list", "[f(x) for x in items]", None),
    ("list-of-plain-calls", "[f(1), g(2)]", None),
    ("tag-in-prose", "I would use a <tool_call> tag here.", None),
    ("function-in-prose", "Write <function=NAME then the parameters.", None),
    ("recipient-in-prose", "Set to=bash in the form.", None),
    ("inline-code", "Run `pytest -x` to see it.", None),
    ("inline-fence", "Run ```bash pytest``` to see it.", None),
    (
        "thought-only",
        "<think>I could call\n```bash\npytest\n```\nbut need not.</think>Done.",
        None,
    ),
    ("thought-cut-off", "<think>I should run\n```bash\npytest\n```\nand", None),
    (
        "template-opened-thought",
        '<tool_call>{"name": "a"}</tool_call> or not?\n</think>\n\nNo need.',
        None,
    ),
]

OPENAI: list[Row] = [
    (
        "function-call",
        '{"type": "function_call", "call_id": "c1", "name": "get_weather",'
        ' "arguments": "{\\"city\\": \\"Oslo\\"}"}',
        key("get_weather"),
    ),
    (
        "function-call-shell",
        '{"type":"function_call","name":"shell",'
        '"arguments":"{\\"command\\":[\\"bash\\",\\"-lc\\",\\"cd /r;pytest\\"]}"}',
        key("shell", "pytest"),
    ),
    (
        "tool-calls",
        '{"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type":'
        ' "function", "function": {"name": "search", "arguments": "{}"}}]}',
        key("search"),
    ),
    (
        "tool-calls-two",
        '{"tool_calls": [{"function": {"name": "search", "arguments": "{}"}},'
        ' {"function": {"name": "fetch_url", "arguments": "{}"}}]}',
        both("fetch_url", "search"),
    ),
    (
        "list-of-items",
        '[{"type":"function_call","name":"a","arguments":"{}"},'
        '{"type":"function_call","name":"b","arguments":"{}"}]',
        both("a", "b"),
    ),
    (
        "legacy-function-call",
        '{"function_call": {"name": "lookup", "arguments": "{}"}}',
        key("lookup"),
    ),
    (
        "in-json-fence",
        'I will search.\n```json\n{"name": "search", "arguments": {"q": "x"}}\n```',
        key("search"),
    ),
    (
        "after-prose",
        'Sure! {"name": "read_file", "arguments": {"path": "a.py"}}',
        key("read_file"),
    ),
    (
        "single-quotes",
        "{'name': 'bash', 'arguments': {'command': 'make -j8 test'}}",
        key("bash", "make", "test"),
    ),
    (
        "trailing-comma",
        '{"name": "bash", "arguments": {"command": "git push",},}',
        key("bash", "git", "push"),
    ),
    (
        "missing-brace",
        '{"name": "bash", "arguments": {"command": "npm test"}',
        key("bash", "npm", "test"),
    ),
    (
        "half-arguments",
        '{"type": "function_call", "name": "bash", "arguments": "{\\"comm',
        key("bash"),
    ),
    (
        "half-command",
        '{"name": "bash", "arguments": {"command": "cd /x && pyte',
        key("bash"),
    ),
    ("half-before-arguments", '{"name": "bash", "argum', None),
    ("half-name", '{"type": "function_call", "name": "ba', None),
    (
        "half-second-call",
        '{"tool_calls": [{"function": {"name": "a", "arguments": "{}"}},'
        ' {"function": {"name": "b',
        key("a"),
    ),
    (
        "stray-quotes",
        '{"name": "bash", "arguments": {"command": "pytest -k "fast" -x"}}',
        key("bash", "pytest"),
    ),
    (
        "local-shell-call",
        '{"type": "local_shell_call", "action": {"type": "exec", "command":'
        ' ["cargo", "build", "--release"]}}',
        key("shell", "cargo", "build"),
    ),
    (
        "result-is-no-call",
        '{"type": "function_call_output", "call_id": "c1", "output": "ok"}',
        None,
    ),
    (
        "in-python-fence",
        '```python\ncall = {"name": "search", "arguments": {}}\n```',
        None,
    ),
    (
        "escapes",
        '{"name": "b\\u0061sh", "arguments": {"command": "cd \\"a b\\"\\nmake"}}',
        key("bash", "make"),
    ),
    ("depth-bomb", '{"a":' * 5000, None),
    (
        "depth-bomb-hides-call",
        '{"a":' * 64 + "\n" + '{"name": "f", "arguments": {}}',
        None,
    ),
]

HERMES: list[Row] = [
    (
        "one",
        hermes('{"name": "get_weather", "arguments": {"city": "Oslo"}}'),
        key("get_weather"),
    ),
    (
        "prose-and-call",
        "I'll check.\n"
        + hermes('{"name": "bash", "arguments": {"command": "cd a && pytest t.py"}}'),
        key("bash", "pytest", "*.py"),
    ),
    (
        "two",
        hermes('{"name": "a", "arguments": {}}')
        + "\n"
        + hermes('{"name": "b", "arguments": {}}'),
        both("a", "b"),
    ),
    (
        "two-shells",
        hermes('{"name": "bash", "arguments": {"command": "pytest"}}')
        + hermes('{"name": "bash", "arguments": {"command": "ls"}}'),
        both("ls", "pytest"),
    ),
    (
        "after-thought",
        "<think>Use search? </think>" + hermes('{"name": "fetch", "arguments": {}}'),
        key("fetch"),
    ),
    ("half-arguments", '<tool_call>\n{"name": "bash", "arguments": {"com', key("bash")),
    ("half-key", '<tool_call>\n{"name": "bash", "argu', key("bash")),
    ("half-name", '<tool_call>\n{"name": "exec', None),
    ("half-tag", "<tool_ca", None),
    ("empty", "<tool_call></tool_call>", None),
    ("garbage", "<tool_call>\nfoo bar baz\n</tool_call>", None),
    ("no-close", '<tool_call>{"name": "f", "arguments": {}}', key("f")),
    (
        "arguments-first",
        hermes('{"arguments": {"command": "make"}, "name": "bash"}'),
        key("bash", "make"),
    ),
    (
        "tag-in-argument",
        hermes('{"name": "grep", "arguments": {"q": "</tool_call><tool_call>"}}'),
        key("grep"),
    ),
    ("list-granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', key("f")),
    (
        "glm",
        "<tool_call>bash\n<arg_key>command</arg_key>\n"
        "<arg_value>cd /r && cargo test</arg_value>\n</tool_call>",
        key("bash", "cargo", "test"),
    ),
    ("glm-half-argument", "<tool_call>bash\n<arg_key>comm", key("bash")),
    ("glm-half-name", "<tool_call>ba", None),
    (
        "wins-over-fence",
        fence("ls") + hermes('{"name": "finish", "arguments": {}}'),
        FINAL_GAP,
    ),
]

LLAMA: list[Row] = [
    ("pythonic", '[get_weather(city="Oslo")]', key("get_weather")),
    (
        "pythonic-two",
        '[get_weather(city="Oslo", n=3), search(q="a)b")]',
        both("get_weather", "search"),
    ),
    ("pythonic-empty", "[list_files()]", key("list_files")),
    (
        "pythonic-shell",
        "[bash(command='cd x && npm test')]",
        key("bash", "npm", "test"),
    ),
    ("pythonic-nested", '[f(x={"a": [1, 2]}, y=g(z=1))]', key("f")),
    ("pythonic-dotted", '[spotify.play(artist="x")]', key("spotify.play")),
    ("pythonic-after-prose", "Let me see:\n[f(x=1)]", key("f")),
    ("pythonic-half", '[get_weather(city="Os', key("get_weather")),
    ("pythonic-half-name", "[get_weath", None),
    ("pythonic-half-second", "[f(x=1), get_wea", key("f")),
    ("pythonic-llama4", "<|python_start|>[f(x=1)]<|python_end|>", key("f")),
    ("pythonic-in-python-fence", "```python\n[f(x=1)]\n```", None),
    (
        "json",
        '{"name": "get_weather", "parameters": {"city": "x"}}',
        key("get_weather"),
    ),
    (
        "json-typed",
        '{"type": "function", "name": "f", "parameters": {"x": "1"}}',
        key("f"),
    ),
    (
        "json-two",
        '{"name": "a", "parameters": {}};{"name": "b", "parameters": {}}',
        both("a", "b"),
    ),
    ("tag-json", '<|python_tag|>{"name": "f", "parameters": {}}', key("f")),
    (
        "tag-json-two",
        '<|python_tag|>{"name": "a", "parameters": {}};{"name": "b", "parameters": {}}',
        both("a", "b"),
    ),
    ("tag-builtin", '<|python_tag|>brave_search.call(query="x")', key("brave_search")),
    ("tag-code", "<|python_tag|>import os\nprint(1)", key("code_interpreter")),
    ("tag-half-name", '<|python_tag|>{"name": "get_', None),
    ("tag-alone", "<|python_tag|>", None),
]

MISTRAL: list[Row] = [
    ("list", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', key("f")),
    (
        "list-two",
        '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        both("a", "b"),
    ),
    ("named", '[TOOL_CALLS]bash{"command": "make test"}', key("bash", "make", "test")),
    (
        "named-args",
        '[TOOL_CALLS]bash[CALL_ID]a1B2[ARGS]{"command": "pip install x"}',
        key("bash", "pip", "install"),
    ),
    ("named-two", "[TOOL_CALLS]a{}[TOOL_CALLS]b{}", both("a", "b")),
    ("half-arguments", '[TOOL_CALLS]bash{"command": "pyt', key("bash")),
    ("half-name", "[TOOL_CALLS]get_wea", None),
    ("half-list", '[TOOL_CALLS] [{"name": "f", "argu', key("f")),
    ("alone", "[TOOL_CALLS]", None),
    ("magistral-thought", "[THINK]a[TOOL_CALLS]b{}[/THINK]No call.", None),
]

FENCED: list[Row] = [
    ("plain", fence("ls -la"), key("bash", "ls")),
    (
        "cd-pytest",
        fence("cd /repo && python -m pytest tests -q"),
        key("bash", "pytest"),
    ),
    ("sh", fence("make", "sh"), key("bash", "make")),
    ("shell", fence("go test ./...", "shell"), key("bash", "go", "test")),
    (
        "mswea",
        fence("cargo build", "mswea_bash_command"),
        key("bash", "cargo", "build"),
    ),
    (
        "mswea-hides-plain",
        fence("ls") + fence("npm ci", "mswea_bash_command"),
        key("bash", "npm", "ci"),
    ),
    ("two-blocks", fence("ls") + fence("pytest"), None),
    ("python-block", fence("print(1)", "python"), None),
    (
        "python-and-bash",
        fence("print(1)", "python") + fence("pytest"),
        key("bash", "pytest"),
    ),
    ("no-language", fence("ls -la", ""), None),
    ("empty", fence(""), None),
    ("indented", "1. Run\n   ```bash\n   pytest\n   ```", key("bash", "pytest")),
    ("info-string", '```bash title="x"\npytest\n```', key("bash", "pytest")),
    ("four-ticks", "````bash\ncat <<E\n```\nE\nmake\n````", key("bash", "make")),
    ("crlf", "```bash\r\ncd x\r\npytest\r\n```\r\n", key("bash", "pytest")),
    ("half-line", "```bash\ncd /repo && pyte", key("bash")),
    ("half-second-line", "```bash\nmake\npytest -x tes", key("bash", "make")),
    ("stop-sequence", "```bash\npytest -x\n", key("bash", "pytest")),
    ("half-opening", "```ba", None),
    (
        "heredoc",
        fence("cat > t.py <<'EOF'\nimport pytest\npytest.main()\nEOF\npython3 t.py"),
        key("bash", "python", "*.py"),
    ),
    (
        "json-in-heredoc",
        fence('cat > c.json <<E\n{"name": "f", "arguments": {}}\nE'),
        key("bash", "cat"),
    ),
    ("final", fence("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), FINAL_GAP),
    (
        "final-diff",
        fence("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff"),
        FINAL_GAP,
    ),
    ("final-quoted", fence('cd /r; echo "MINI_SWE_AGENT_FINAL_OUTPUT"'), FINAL_GAP),
    (
        "after-thought",
        "<think>```bash\nls\n```</think>\n" + fence("pytest"),
        key("bash", "pytest"),
    ),
]

TERMINAL_BENCH: list[Row] = [
    (
        "one",
        '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "make test\\n",'
        ' "duration": 5.0}], "task_complete": false}',
        key("terminal", "make", "test"),
    ),
    (
        "several",
        '{"state_analysis": "a", "explanation": "e", "commands": [{"keystrokes":'
        ' "cd /app\\n", "is_blocking": false}, {"keystrokes": "pytest -q\\n"},'
        ' {"keystrokes": "ls\\n"}], "is_task_complete": false}',
        key("terminal", "pytest"),
    ),
    ("control-key", '{"commands": [{"keystrokes": "C-c"}]}', key("terminal")),
    ("waits", '{"analysis": "a", "commands": []}', key("terminal")),
    ("complete", '{"analysis": "", "commands": [], "task_complete": true}', FINAL_GAP),
    (
        "fenced-json",
        '```json\n{"plan": "", "commands": [{"keystrokes": "apt-get update\\n"}]}\n```',
        key("terminal", "apt-get", "update"),
    ),
    (
        "half-keystrokes",
        '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "pyt',
        key("terminal"),
    ),
    ("half-before-commands", '{"analysis": "a", "plan": "p", "comma', None),
    ("other-commands", '{"commands": ["a", "b"]}', None),
]

ANTHROPIC: list[Row] = [
    (
        "block",
        '{"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}}',
        key("Read"),
    ),
    (
        "message",
        '{"role": "assistant", "content": [{"type": "text", "text": "ok"},'
        ' {"type": "tool_use", "name": "Bash", "input": {"command":"npm run build"}}]}',
        key("Bash", "npm", "build"),
    ),
    ("half-input", '{"type": "tool_use", "name": "Bash", "input": {"comm', key("Bash")),
    ("half-name", '{"type": "tool_use", "id": "t1", "name": "Ba', None),
    (
        "invoke",
        '<function_calls>\n<invoke name="Bash">\n<parameter name="command">cd /r && '
        "pytest</parameter>\n</invoke>\n</function_calls>",
        key("Bash", "pytest"),
    ),
    (
        "invoke-two",
        '<invoke name="Read"><parameter name="path">a</parameter></invoke>'
        '<invoke name="Grep"><parameter name="q">b</parameter></invoke>',
        both("Grep", "Read"),
    ),
    (
        "invoke-minimax",
        '<minimax:tool_call><invoke name="search"></invoke></minimax:tool_call>',
        key("search"),
    ),
    (
        "invoke-about-invoke",
        '<invoke name="Write"><parameter name="text"><invoke name="Bash"></parameter>'
        "</invoke>",
        key("Write"),
    ),
    (
        "invoke-writes-fence",
        '<invoke name="Write"><parameter name="text"># A\n```bash\nmake\n```\n'
        "</parameter></invoke>",
        key("Write"),
    ),
    (
        "invoke-half-value",
        '<invoke name="Bash"><parameter name="command">pyte',
        key("Bash"),
    ),
    ("invoke-half-name", '<invoke name="Ba', None),
    ("subagent", '<invoke name="Task"><parameter name="p">x</parameter>', key("Task")),
]

FUNCTION_XML: list[Row] = [
    (
        "qwen3-coder",
        "<tool_call>\n<function=bash>\n<parameter=command>\nuv run pytest -q\n"
        "</parameter>\n</function>\n</tool_call>",
        key("bash", "pytest"),
    ),
    (
        "qwen3-coder-no-opening",
        "<function=read_file>\n<parameter=path>\na.py\n</parameter>\n</function>",
        key("read_file"),
    ),
    (
        "qwen3-coder-two",
        "<tool_call><function=a></function></tool_call>"
        "<tool_call><function=b></function></tool_call>",
        both("a", "b"),
    ),
    (
        "openhands",
        "I'll run it.\n<function=execute_bash>\n<parameter=command>cd /w && make "
        "-j4</parameter>\n</function>",
        key("execute_bash", "make"),
    ),
    (
        "openhands-stop-sequence",
        "<function=execute_bash>\n<parameter=command>git clone u</parameter>\n",
        key("execute_bash", "git", "clone"),
    ),
    (
        "unclosed-parameter",
        "<function=execute_bash>\n<parameter=command>mvn test\n</function>",
        key("execute_bash", "mvn", "test"),
    ),
    (
        "openhands-input",
        "<function=execute_bash><parameter=command>C-c</parameter>"
        "<parameter=is_input>true</parameter></function>",
        key("execute_bash"),
    ),
    (
        "openhands-finish",
        "<function=finish><parameter=message>ok</parameter></function>",
        FINAL_GAP,
    ),
    (
        "editor",
        "<function=str_replace_editor>\n<parameter=command>view</parameter>"
        "\n<parameter=path>/a</parameter>\n</function>",
        key("str_replace_editor"),
    ),
    (
        "half-value",
        "<function=execute_bash>\n<parameter=command>pyte",
        key("execute_bash"),
    ),
    ("half-name", "<function=execute_ba", None),
]

HARMONY: list[Row] = [
    (
        "call",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Oslo"}<|call|>',
        key("get_weather"),
    ),
    (
        "recipient-first",
        "<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>"
        '{"command":"cd /r && go build ./..."}<|call|>',
        key("bash", "go", "build"),
    ),
    (
        "container-exec",
        "<|channel|>commentary to=container.exec code<|message|>"
        '{"cmd":["bash","-lc","pytest -q | tail -5"],"timeout":1000}<|call|>',
        key("container.exec", "pytest"),
    ),
    ("python", "<|channel|>analysis to=python code<|message|>print(1)", key("python")),
    (
        "browser",
        '<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>',
        key("browser.search"),
    ),
    (
        "final-channel",
        "<|channel|>final<|message|>It is sunny.<|return|>",
        None,
    ),
    (
        "half-arguments",
        "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
        '{"command":"pyt',
        key("bash"),
    ),
    ("half-header", "<|channel|>commentary to=functions.bash <|constr", key("bash")),
    ("half-name", "<|channel|>commentary to=functions.ba", None),
    (
        "no-special-tokens",
        'analysisI need.assistantcommentary to=functions.bash json{"command":"make"}',
        key("bash", "make"),
    ),
    ("to-user", "<|start|>assistant to=user<|channel|>final<|message|>Hi", None),
]

DEEPSEEK: list[Row] = [
    (
        "v3",
        f"{BEGINS}{BEGIN}function{SEP}get_weather\n```json\n"
        f'{{"city": "Oslo"}}\n```{END}{ENDS}',
        key("get_weather"),
    ),
    (
        "v31",
        f'{BEGINS}{BEGIN}bash{SEP}{{"command": "npm install"}}{END}{ENDS}',
        key("bash", "npm", "install"),
    ),
    (
        "v31-two",
        f"{BEGINS}{BEGIN}a{SEP}{{}}{END}{BEGIN}b{SEP}{{}}{END}",
        both("a", "b"),
    ),
    ("half-arguments", f'{BEGINS}{BEGIN}bash{SEP}{{"comm', key("bash")),
    ("half-name", f"{BEGINS}{BEGIN}get_wea", None),
    ("v3-half-name", f"{BEGINS}{BEGIN}function{SEP}get_wea", None),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        '<|tool_call_argument_begin|>{"command": "cargo test"}<|tool_call_end|>',
        key("bash", "cargo", "test"),
    ),
]

SPECIAL: list[Row] = [
    ("ask-user", hermes('{"name": "AskUserQuestion", "arguments": {}}'), APPROVAL_GAP),
    (
        "ask-beside-tool",
        hermes('{"name": "bash", "arguments": {"command": "ls"}}')
        + hermes('{"name": "ask_user", "arguments": {}}'),
        APPROVAL_GAP,
    ),
    (
        "finish-beside-tool",
        "[finish(), bash(command='ls')]",
        FINAL_GAP,
    ),
    (
        "reserved-name",
        hermes('{"name": "__user__", "arguments": {}}'),
        key("tool:__user__"),
    ),
    (
        "control-characters",
        hermes('{"name": "a\\u0000b\\nc", "arguments": {}}'),
        key("unknown_tool"),
    ),
    (
        "lone-surrogate",
        hermes('{"name": "a\\ud800b", "arguments": {}}'),
        key("unknown_tool"),
    ),
    (
        "long-name",
        hermes('{"name": "' + "n" * 128 + '", "arguments": {}}'),
        key("n" * 64),
    ),
    (
        "text-as-a-name",
        hermes('{"name": "' + "n" * 129 + '", "arguments": {}}'),
        key("unknown_tool"),
    ),
    (
        "long-argument",
        hermes('{"name": "write_file", "arguments": {"text": "' + "x" * 99_999 + '"}}'),
        key("write_file"),
    ),
    ("call-at-the-end", "x\n" * 50_000 + fence("make"), key("bash", "make")),
    (
        "very-long-thought",
        "<think>"
        + fence("ls")
        + "x" * 60_000
        + "</think>"
        + "y" * 40_000
        + fence("make"),
        key("bash", "make"),
    ),
    ("call-in-the-middle", "x\n" * 30_000 + fence("ls") + "x\n" * 30_000, None),
]

FORMATS: dict[str, list[Row]] = {
    "prose": PROSE,
    "openai": OPENAI,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "fenced": FENCED,
    "terminal-bench": TERMINAL_BENCH,
    "anthropic": ANTHROPIC,
    "function-xml": FUNCTION_XML,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "special": SPECIAL,
}
ROWS = [
    pytest.param(text, expected, id=f"{name}-{case}")
    for name, rows in FORMATS.items()
    for case, text, expected in rows
]
SHORT_CALLS = [
    text
    for rows in FORMATS.values()
    for _, text, expected in rows
    if rows is not SPECIAL and expected is not None and len(text) < 400
]


@pytest.mark.parametrize(("text", "expected"), ROWS)
def test_output_text_gives_this_key(text: str, expected: GapKey | None) -> None:
    assert detect(text) == expected


def test_tables_are_large() -> None:
    assert len(ROWS) >= 130


@given(st.text(max_size=2_000))
def test_arbitrary_text_never_raises(text: str) -> None:
    detect(text)
    shell_key(text)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "', '"arguments": {', "}", "[", "]",
        "(", ")", '"', "'", "\\", "```bash\n", "```\n", "<function=f>", "f(x=",
        "<parameter=command>", "</parameter>", "</function>", "[TOOL_CALLS]", "bash",
        "<|python_tag|>", "to=functions.f ", "<|message|>", BEGIN, SEP, "<<EOF\n",
        "EOF\n", "$(", "`", "&&", "|", "; ", "\n", " -c ", "sudo ", "timeout ", "x",
        '<invoke name="f">', '<parameter name="command">', "<think>", "</think>",
        '"commands": [{"keystrokes": "', "python -m ", "#", "\x00", "\ud800",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(FRAGMENTS, max_size=60).map("".join))
def test_shuffled_fragments_give_clean_keys_or_none(text: str) -> None:
    for key in (detect(text), shell_key(text)):
        parts = () if key is None else (key.tool, key.executable, key.second)
        assert all(part.isprintable() and " " not in part for part in parts)
        assert key is None or key.tool


# Names that formats imply, or that stand for others.
IMPLIED = {"", "bash", "shell", "terminal", "code_interpreter", "python"}


@pytest.mark.parametrize("text", SHORT_CALLS)
def test_truncation_never_invents_a_name(text: str) -> None:
    """Wherever a call is cut off, half a name is no name."""
    for end in range(len(text)):
        cut = detect(text[:end])
        if cut is None or cut in (FINAL_GAP, APPROVAL_GAP):
            continue
        tools = () if cut.tool == PARALLEL_TOOL else (cut.tool,)
        for name in {*tools, *cut.executable.split("+")} - IMPLIED:
            assert re.search(re.escape(name) + r"(?![\w-])", text), text[:end]


@pytest.mark.parametrize(
    "unit",
    [
        "(", "[", "{", '{"', "{'", '{"a":', '{"name":', '[{"name": "f", "arguments":',
        "```bash\n", "```", "`", "<tool_call>", '<tool_call>{"', "<tool_call>[",
        "<function=f>", "<parameter=x>", "<function=f><parameter=x>", "<function=",
        '<invoke name="f">', '<invoke name="f"><parameter name="x">', "<invoke",
        "[TOOL_CALLS]", "[TOOL_CALLS]f{", "<|python_tag|>", "<|python_tag|>[",
        "[f(", "\n[f(x=", "to=functions.f ", " to=f <|", BEGIN, BEGIN + "f" + SEP + "{",
        '"', "'", "\\", '\\"', " ", "\n", "\t{", "a", "a ", "\u00e9", "<think>",
        "</think>", '{"commands":[', "<arg_key>a</arg_key><arg_value>", "<|", "$(",
        "${", "<<E ", "<<E\n", "cd x && ", "a=b ", "sudo ", "bash -c '", "bash -c ",
        '"\\', "$'", "|", "&", "#", "0", "0<", "a.", "-m ", "~~~\n", "{ ", '{\n"',
    ],
)  # fmt: skip
def test_no_input_takes_long(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    openings = ("", "```bash\n", "<tool_call>", '{"name": "bash", "arguments": {"c": "')
    for opening in openings:
        start = time.process_time()
        detect(opening + text)
        shell_key(opening + text)
        assert time.process_time() - start < 2.0


def test_scanned_length_is_bounded() -> None:
    assert SCAN_LIMIT == 32 * 1024
