"""Chat templates run in a sandbox: what they may do, and that none runs away."""

from __future__ import annotations

import time

import pytest

from outrider.errors import CheckpointError, PromptError
from outrider.models.loading import chat_template
from outrider.models.loading.chat_template import ChatTemplate
from tests.tiny import CHATML

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages=HELLO, *, variables=None, add_generation_prompt=False) -> str:
    template = ChatTemplate(source, variables or {})
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def test_chatml():
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    assert expected == render(CHATML, add_generation_prompt=True)


def test_special_tokens_are_variables():
    assert "<s>Hello</s>" == render(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        variables={"bos_token": "<s>", "eos_token": "</s>"},
    )


def test_blocks_swallow_their_line_as_in_transformers():
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n"
        "    {% endif %}\n{% endfor %}\n"
    )

    assert "Hello\n" == render(source)


def test_loop_controls_and_generation_blocks():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
    )

    assert "Hello!" == render(source, HELLO * 3)


def test_tojson_leaves_html_and_unicode_alone():
    assert '{"a": "<é>"}' == render("{{ {'a': '<é>'} | tojson }}")


def test_strftime_now_gives_a_date():
    assert str(time.localtime().tm_year) in render("{{ strftime_now('%Y') }}")


def test_namespaces_macros_and_concatenation():
    source = (
        "{% macro turn(m) %}[{{ m.role ~ ':' ~ m.content }}]{% endmacro %}"
        "{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{% endfor %}{{ ns.n * 2 }}"
    )

    assert "[user:Hello][user:Hello]4" == render(source, HELLO * 2)


def test_raise_exception_reaches_the_user():
    with pytest.raises(PromptError, match="the chat template refuses: roles must alternate"):
        render("{{ raise_exception('roles must\nalternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.nothing.at.all }}",
        "{{ undefined_function() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_a_failing_template_is_one_line(source):
    with pytest.raises(PromptError, match="the chat template") as error:
        render(source)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["{% for", "{{ }}", "{% unknown %}", "{{ x | nofilter }}"])
def test_an_invalid_template_is_refused_when_it_is_read(source):
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ ''|attr('__class__')|attr('mro')() }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(PromptError, match="the chat template refuses"):
        render(source)


ENDLESS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "endless output": "{% for a in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
    "doubling by ~": (
        "{% set ns = namespace(x='ab') %}"
        "{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "doubling by +": (
        "{% set ns = namespace(x='ab') %}"
        "{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "repetition": "{{ 'ab' * 999999999999 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "recursive macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive loop": (
        "{% for m in [messages] recursive %}{{ loop([m, m]) }}{{ loop([m, m]) }}{% endfor %}"
    ),
    "range": "{{ range(10 ** 12) | list }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_no_template_runs_away(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    start = time.monotonic()

    with pytest.raises(PromptError, match="the chat template"):
        render(source)
    assert time.monotonic() - start < 20


def test_the_bounds_leave_room_for_long_conversations():
    messages = [{"role": "user", "content": "word " * 1000}] * 1000

    assert 1000 == render(CHATML, messages).count("<|im_start|>user")


def test_rendering_does_not_change_the_messages():
    messages = [{"role": "user", "content": "a"}]
    render("{% for m in messages %}{{ m.content }}{% endfor %}", messages)

    assert [{"role": "user", "content": "a"}] == messages
