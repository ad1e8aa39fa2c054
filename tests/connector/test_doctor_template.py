"""What `ttlcache doctor` says of a chat template."""

from __future__ import annotations

from importlib.resources import files

import pytest
from typer.testing import CliRunner

from bench.serve.tiny_model import build
from ttlcache.cli import app
from ttlcache_connector.cli.doctor_template import findings
from ttlcache_lmcache.findings import BAD, NOTE, OK

LOOP = (
    "{% for m in messages %}GUARD<|{{ m.role }}|>\nTHINK{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
THINK = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
)
PLAIN = LOOP.replace("GUARD", "").replace("THINK", THINK)
GUARD = (
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
)
GATHERS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}"
    + PLAIN.removeprefix("{% for m in messages %}")
)
LAST_ONLY = THINK.replace("%}", "and loop.last %}", 1)
SUFFIX = PLAIN.replace(
    "{{ m.content }}", "{% if loop.last %}[now]{% endif %}{{ m.content }}"
)


def said(tmp_path, template: str) -> list[tuple[str, str]]:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    return [(f.state, f.text) for f in findings(None, file)]


def test_a_template_that_only_appends_is_fine(tmp_path):
    ((state, text),) = said(tmp_path, PLAIN)
    assert (state, "leaves everything before it" in text) == (OK, True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            LOOP.replace("GUARD", GUARD).replace("THINK", THINK),
            "refuses system messages",
        ),
        (GATHERS, "moves all system messages to the head"),
        (
            PLAIN.replace(
                "{% for m in messages %}",
                "{% for m in messages if m.role != 'system' or m == messages[0] %}",
            ),
            "drops system messages behind",
        ),
        (PLAIN.replace(THINK, LAST_ONLY), "drops reasoning of turns before"),
        (
            PLAIN.replace(THINK, "").replace(
                "m.content", "m.content.split('</think>')[-1]"
            ),
            "drops all reasoning",
        ),
        (SUFFIX, "rewrites earlier messages"),
        ("{{ raise_exception('no') }}", "refuses a plain conversation"),
    ],
)
def test_what_makes_earlier_turns_change_is_a_note(tmp_path, template, words):
    found = said(tmp_path, template)
    assert any(words in text for _, text in found), found
    assert {state for state, _ in found} == {NOTE}


def test_system_text_in_front_names_the_clients_setting(tmp_path):
    texts = [
        text
        for _, text in said(
            tmp_path, LOOP.replace("GUARD", GUARD).replace("THINK", THINK)
        )
    ]
    assert any("CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in text for text in texts)


def test_vllms_own_template_for_chats_is_rendered(tmp_path):
    folder = files("vllm") / "transformers_utils" / "chat_templates"
    found = said(tmp_path, (folder / "template_chatml.jinja").read_text())
    assert not any("refuses" in text or "rewrites" in text for _, text in found)


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
