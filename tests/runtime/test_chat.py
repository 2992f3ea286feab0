from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_template_utils import render_jinja_template

from edgekit.errors import UnsupportedError, UsageError
from edgekit.runtime import jinja_sandbox
from edgekit.runtime.chat import ChatTemplate, end_of_turn_ids
from edgekit.runtime.tokenizer import Tokenizer

Load: TypeAlias = Callable[[Backend], Tokenizer]

SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "chat_templates").iterdir()}
SPECIAL_TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
QUESTION = {"role": "user", "content": "What is <b>2 + 2</b>?"}
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "a question": [QUESTION],
    "spaces and quotes": [{"role": "user", "content": '  it\'s "fine" \\ {{ no }} {% code %}\n\n'}],
    "a system prompt": [{"role": "system", "content": "Sei höflich. 你好"}, QUESTION],
    "two rounds": [
        {"role": "system", "content": "Be brief: <b>你好</b>."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello! \n"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "<think>\nThey leave.\n</think>\n\nBye!"},
    ],
    "a tool": [QUESTION, {"role": "assistant", "content": "add(2, 2)"}, {"role": "tool", "content": "4"}],
    "the wrong order": [{"role": "assistant", "content": "Hello"}, QUESTION],
}


def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL_TOKENS)


def _transformers_rendering(source: str, messages: list[dict[str, str]], **variables: Any) -> str | Exception:
    try:
        rendered: Any = render_jinja_template([messages], chat_template=source, **SPECIAL_TOKENS, **variables)
    except Exception as error:  # noqa: BLE001 - whatever it is, we must refuse too
        return error
    text: str = rendered[0][0]
    return text


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_conversations_are_rendered_as_by_transformers(
    name: str, conversation: str, add_generation_prompt: bool
) -> None:
    source, messages = SOURCES[name], CONVERSATIONS[conversation]
    expected = _transformers_rendering(source, messages, add_generation_prompt=add_generation_prompt)
    if isinstance(expected, str):
        rendered = _template(source).render(messages, add_generation_prompt=add_generation_prompt)
        assert rendered == expected
        assert rendered
    else:
        with pytest.raises(UsageError, match="does not take these messages: "):
            _template(source).render(messages, add_generation_prompt=add_generation_prompt)


def test_the_comparison_covers_both_renderings_and_refusals() -> None:
    outcomes = [
        isinstance(_transformers_rendering(source, messages), str)
        for source in SOURCES.values()
        for messages in CONVERSATIONS.values()
    ]
    assert outcomes.count(True) >= 25
    assert outcomes.count(False) >= 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ messages[0] | tojson(true, none, (',', ':')) }}",
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}\n{% endfor %}",
        "{{ strftime_now('%Y-%m-%d') }}{{ tools is none }}{{ documents is none }}{{ unknown is defined }}",
        "{% set ns = namespace(n=0, items=[]) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{{ dict(a=1, b=bos_token) | tojson }}{{ '-' * 3 }}{{ 2 * 21 }}{{ 'x%02d' % 7 }}{{ '{}'.format(eos_token) }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{% call(x) f() %}{% endcall %}",
        "{{ 'a' ~ 1 ~ none ~ [bos_token] }}{{ 'x' + 'y' }}{{ [1] + [2] }}{{ 7 % 4 }}{{ 99999 * 99999 }}{{ 1.5 * 2 }}",
        "{{ '%s: %5.2f|%-4s|%%' % ('a' ~ bos_token, 2.5, 'x') }}",
        "{{ '%(k)s*%(k)s' % {'k': bos_token} }}{% set x = messages[0].content ~ '\n' %}{{ x ~ (x ~ x) }}",
        "{% for m in messages recursive %}{{ m.role }}{% endfor %}{{ messages | map(attribute='role') | join(',') }}",
    ],
)
def test_jinja_features_work_as_in_transformers(source: str) -> None:
    messages = CONVERSATIONS["two rounds"]
    expected = _transformers_rendering(source, messages, add_generation_prompt=True)
    if isinstance(expected, str):
        assert _template(source).render(messages) == expected
    else:
        with pytest.raises(UnsupportedError):
            _template(source).render(messages)


def test_an_option_reaches_the_template() -> None:
    expected = _transformers_rendering(SOURCES["qwen3"], [QUESTION], add_generation_prompt=True, enable_thinking=False)
    rendered = _template(SOURCES["qwen3"]).render([QUESTION], options={"enable_thinking": False})
    assert rendered == expected
    assert rendered.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "bos_token", "tools", "namespace"])
def test_an_option_that_the_template_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"no option '{name}'; known: .*enable_thinking"):
        _template(SOURCES["qwen3"]).render([QUESTION], options={name: True})
    with pytest.raises(UsageError, match=f"no option '{name}'$"):
        _template(SOURCES["chatml"]).render([QUESTION], options={name: True})


def test_an_option_that_is_no_plain_value_is_refused() -> None:
    options: dict[str, Any] = {"enable_thinking": object}
    with pytest.raises(UsageError, match="must be a truth value, number or text"):
        _template(SOURCES["qwen3"]).render([QUESTION], options=options)


def test_the_date_is_todays() -> None:
    assert f"Today Date: {datetime.now():%d %b %Y}\n" in _template(SOURCES["llama3"]).render([QUESTION])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "the conversation has no message"),
        (["hello"], "message 0 is 'hello'; it must be a mapping"),
        ([QUESTION, {"role": "user"}], "message 1 has the content None; it must be a text"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "it must be a text"),
        ([{"content": "hi"}], "message 0 has the role None"),
        ([{"role": "usr", "content": "hi"}], r"the role 'usr'; known: .*\(did you mean 'user'\?\)"),
        ([QUESTION | {"tool_calls": []}], "message 0 has an unknown field 'tool_calls'; known: content, role"),
    ],
)
def test_a_malformed_conversation_is_refused(messages: list[Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        _template(SOURCES["chatml"]).render(messages)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ ['a', 1, 'b'] | join(', ') }}{{ ['a', 'b'] | join }}", "a, 1, bab"),
        ("{{ '-'.join(['a', 'b']) }}", "a-b"),
        (
            "{{ 'aaa'.replace('a', 'bc', 2) }}{{ 'aaa' | replace('a', 'b') }}{{ 'aaa' | replace('a', 'b', 1) }}",
            "bcbcabbbbaa",
        ),
        ("{{ 'ab'.replace('', '-') }}", "-a-b-"),
    ],
)
def test_texts_are_joined_and_replaced_as_python_does(source: str, rendered: str) -> None:
    assert _template(source).render([QUESTION]) == rendered


def test_a_role_may_be_an_enum_of_texts() -> None:
    class Role(str, Enum):
        USER = "user"

    rendered = _template("{{ messages[0].role }}{{ messages[0].role.name is defined }}").render(
        [{"role": Role.USER, "content": ""}]
    )
    assert rendered == "userFalse"


def test_a_refusal_of_the_template_is_reported_in_one_short_line() -> None:
    with pytest.raises(UsageError, match=r"does not take these messages: System role not supported$"):
        _template(SOURCES["gemma"]).render(CONVERSATIONS["a system prompt"])
    with pytest.raises(UsageError) as error:
        _template("{{ raise_exception('no\n' * 1000) }}").render([QUESTION])
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}", "in line 1: Unexpected end of template"),
        ("\n\n{{ messages | no_such_filter }}", "in line 3: No filter named 'no_such_filter'"),
        ("{{ messages[0].content | center(1000000000) }}", "in line 1: No filter named 'center'"),
        ("{% vision %}", "in line 1: Encountered unknown tag 'vision'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "RecursionError"),
    ],
)
def test_a_template_that_does_not_compile_is_refused_with_its_line(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"chat template cannot be compiled: .*{reason}"):
        _template(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of a list is unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{{ messages['append'](1) }}", "SecurityError"),
        ("{{ messages[0].update(role='x') }}", "SecurityError"),
        ("{{ '{0.__class__}'.format(messages) }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__html__ = messages %}", "SecurityError"),
        ("{{ namespace(__html__=1) }}", "SecurityError"),
        ("{{ self._TemplateReference__context }}", "SecurityError"),
        ("{% include 'other.jinja' %}", "no loader"),
        ("{{ messages[0].content.missing.more }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_does_what_it_may_not_is_stopped(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the chat template fails: .*{reason}"):
        _template(source).render([QUESTION])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "computes a power"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% set r = range(90000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "20000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "20000 steps",
        ),
        ("{% for i in range(9000) %}{{ 'x' * 9000 }}{% endfor %}", "8388608 characters"),
        ("{{ 'x' * 900000000000000000 }}", "8388608 characters"),
        ("{{ 900000000000000000 * 'x' }}", "8388608 characters"),
        ("{{ [1] * 900000000000000000 }}", "8388608 characters"),
        (
            "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "8388608 characters",
        ),
        (
            "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "8388608 characters",
        ),
        ("{% set a = 'xxxxxxxx' %}" + "{% set a = a ~ a %}" * 40, "8388608 characters"),
        ("{% set a = 'xxxxxxxx' %}" + "{% set a = a + a %}" * 40, "8388608 characters"),
        ("{% set a = [1, 2] %}" + "{% set a = a + a %}" * 40, "8388608 characters"),
        ("{{ messages[0].content * 5000000000 }}", "8388608 characters"),
        ("{{ '%1000000000d' % 1 }}", "8388608 characters"),
        ("{{ ('%s' * 100000) % (('x' * 100000,) * 100000) }}", "8388608 characters"),
        ("{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}", "8388608 characters"),
        ("{{ '%*d' % (1000000000, 1) }}", "formats to a width that it computes"),
        ("{{ '%(a)-*d' % (1000000000, 1) }}", "formats to a width that it computes"),
        ("{% set a = 9 %}" + "{% set a = a * a %}" * 40, "an integer of more than 1024 bits"),
        ("{{ range(99999) | join('x' * 99999) }}", "8388608 characters"),
        ("{{ ('x' * 99999).join(['a'] * 99999) }}", "8388608 characters"),
        ("{{ ('x' * 99999).replace('x', 'y' * 99999) }}", "8388608 characters"),
        ("{{ ('x' * 99999) | replace('x', 'y' * 99999) }}", "8388608 characters"),
        ("{{ 'x'.ljust(1000000000) }}", "8388608 characters"),
        ("{{ '{:1000000000}'.format(1) }}", "8388608 characters"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "8388608 characters"),
        ("{{ '%1000000000d' | format(1) }}", "8388608 characters"),
        ("{% set width = 1000000000 %}{{ messages[0].content.zfill(width) }}", "8388608 characters"),
    ],
)
def test_a_template_that_explodes_is_stopped(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_STEPS", 20_000)  # the real bound takes a second to reach
    with pytest.raises(UnsupportedError, match=reason):
        _template(source).render([QUESTION])


def test_the_bounds_hold_for_each_rendering_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_STEPS", 10)
    template = _template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for _ in range(3):
        assert template.render([QUESTION] * 10) == QUESTION["content"] * 10
    with pytest.raises(UnsupportedError, match="more than 10 steps"):
        template.render([QUESTION] * 11)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_end|>"),
        ("llama2", "</s>"),
        ("llama3", "<|eot_id|>"),
        ("zephyr", "</s>"),
        ("gemma", "<end_of_turn>"),
        ("qwen3", "<|im_end|>"),
        ("generation_tag", "<|im_end|>"),
    ],
)
def test_the_token_that_ends_a_turn_is_found(name: str, expected: str, byte_level: Backend, load: Load) -> None:
    assert end_of_turn_ids(load(byte_level), _template(SOURCES[name])) == {byte_level.token_to_id(expected)}


def test_the_token_that_ends_a_turn_follows_the_last_copy_of_the_answer(byte_level: Backend, load: Load) -> None:
    template = _template("{% for m in messages * 2 %}{{ m.content }}, {% endfor %}{{ messages[-1].content }}</s>")
    assert end_of_turn_ids(load(byte_level), template) == {byte_level.token_to_id("</s>")}


def test_the_token_that_ends_a_turn_is_found_behind_a_space_of_sentencepiece(
    byte_fallback: Backend, load: Load
) -> None:
    assert end_of_turn_ids(load(byte_fallback), _template(SOURCES["llama2"])) == {2}


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }} then </s>{% endfor %}",
        "{% for m in messages %}{{ m.content }}  {% endfor %}",
        "{{ messages[0].content }}</s>",
    ],
)
def test_a_turn_that_no_added_token_ends_has_no_end(source: str, byte_level: Backend, load: Load) -> None:
    byte_level.add_tokens(["  "])
    assert end_of_turn_ids(load(byte_level), _template(source)) == frozenset()


@pytest.mark.parametrize("name", ["llama3", "gemma", "chatml"])
def test_a_rendered_chat_is_encoded_without_a_second_beginning_of_text(
    name: str, byte_fallback: Backend, load: Load
) -> None:
    tokenizer = load(byte_fallback)
    ids = tokenizer.encode_prompt(_template(SOURCES[name]).render([QUESTION]))
    assert ids[0] == 1
    assert ids.count(1) == 1
