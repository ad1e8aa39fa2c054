"""What `ttlcache doctor` says of a chat template."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.serve.tiny_model import build
from ttlcache.cli.main import app
from ttlcache_connector.cli.doctor_template import BAD, NOTE, OK, findings

ALL = "{% for m in messages %}"
THINK = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
)
LOOP = (
    f"{ALL}<|{{{{ m.role }}}}|>\n{THINK}{{{{ m.content }}}}<|end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GUARD = (
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
)


def with_loop_over(condition: str) -> str:
    return LOOP.replace(ALL, ALL.replace(" %}", f" if {condition} %}}"))


def said(tmp_path, template: str) -> list[tuple[str, str]]:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    return [(f.state, f.text) for f in findings(None, file)]


@pytest.mark.parametrize(
    ("template", "state", "words"),
    [
        (LOOP, OK, "leaves everything before it"),
        (LOOP.replace(ALL, ALL + GUARD), NOTE, "refuses system messages"),
        (
            LOOP.replace(ALL, ALL + GUARD),
            NOTE,
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off",  # a client's setting
        ),
        (
            SYSTEM_FIRST + with_loop_over("m.role != 'system'"),
            NOTE,
            "moves all system messages to the head",
        ),
        (
            with_loop_over("m.role != 'system' or m == messages[0]"),
            NOTE,
            "drops system messages behind",
        ),
        (
            LOOP.replace(THINK, THINK.replace("%}", "and loop.last %}", 1)),
            NOTE,
            "drops reasoning of turns before",
        ),
        (
            LOOP.replace(THINK, "").replace(
                "m.content", "m.content.split('</think>')[-1]"
            ),
            NOTE,
            "drops all reasoning",
        ),
        (
            LOOP.replace(
                "{{ m.content }}", "{% if loop.last %}[now]{% endif %}{{ m.content }}"
            ),
            NOTE,
            "rewrites earlier messages",
        ),
        ("{{ raise_exception('no') }}", NOTE, "refuses a plain conversation"),
    ],
)
def test_what_makes_earlier_turns_change_is_a_note(tmp_path, template, state, words):
    found = said(tmp_path, template)
    assert any(words in text for _, text in found), found
    assert {each for each, _ in found} == {state}


def test_a_models_template_is_found(tmp_path):
    model = build(tmp_path / "tiny")
    (found,) = findings(str(model), None)
    assert found.state in (OK, NOTE)
    done = CliRunner().invoke(app, ["doctor", "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "chat template" in done.output


def test_what_is_not_there_or_no_template_never_raises(tmp_path):
    (found,) = findings(str(tmp_path / "none"), None)
    assert found.state == BAD
    (found,) = findings(None, tmp_path / "none")
    assert found.state == BAD
    ((state, _), *_) = said(tmp_path, "{% for")
    assert state == NOTE
    assert list(findings(None, None)) == []
