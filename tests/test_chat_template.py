"""Chat templates: known prompts from known conversations, and refusals that name what is wrong."""

import json
import re
import time
from datetime import datetime

import jinja2
import pytest

from jhybrid import template_sandbox
from jhybrid.chat_template import ChatTemplate
from jhybrid.errors import ConfigError, RequestError
from jhybrid.tokenizer import ByteTokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi <b>&</b> 你好"}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " Yes. "}, USER]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def test_chatml():
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b> 你好<|im_end|>\n"
    assert template(CHATML).render(TURNS[:2], add_generation_prompt=False) == head
    assert template(CHATML).render(TURNS[:2]) == head + "<|im_start|>assistant\n"


def test_llama2_with_bos_and_system():
    assert template(LLAMA2).render(TURNS) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi <b>&</b> 你好 [/INST] Yes. </s><s>[INST] Hi <b>&</b> 你好 [/INST]"
    )


def test_functions_that_templates_use():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% set ns = namespace(count=0) %}{% set ns.count = ns.count + 2 %}{{ ns.count }}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}"
        "{% endfor %}{{ enable_thinking }}{{ missing }}"
    )
    tools = [{"name": "f", "description": "<é>"}]
    before = datetime.now().year
    text = template(source).render([USER, USER], tools=tools, enable_thinking=False)
    years = {
        f"2{json.dumps(USER, ensure_ascii=False)}{year}{json.dumps(tools, ensure_ascii=False, indent=2)}False"
        for year in (before, datetime.now().year)
    }
    assert text in years


def test_tool_template_is_taken_for_tools():
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert both.render([USER]) == "plain"
    assert both.render([USER], tools=[{"name": "f"}]) == "tools"


def test_of_a_tokenizer_the_prompt_has_one_bos():
    tokenizer = ByteTokenizer(chat_template="{{ bos_token }}{{ messages[0].content }}")
    prompt = ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(prompt, add_special_tokens=False) == tokenizer.encode(prompt) == [256, 104, 105]


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (LLAMA2, [USER, USER], "messages: the chat template refused them: Conversation roles must alternate"),
        (CHATML, [{"role": "user", "content": None}], "messages: the chat template failed (TypeError"),
        (CHATML, [], "messages: is empty"),
        (CHATML, [{"content": "x"}], "messages[0].role: must be a string, got None"),
        (CHATML, [USER, "x"], "messages[1]: must be an object"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", [USER], "grows beyond"),
        ("{{ 1 / 0 }}", [USER], "ZeroDivisionError"),
    ],
)
def test_refusals_name_the_field(source: str, messages: list, message: str):
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        template(source).render(messages)
    assert caught.value.field.startswith("messages")


DOUBLED = "{% set ns = namespace(x=['a'], d=none) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
NESTED = "{% set ns = namespace(x=()) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
LONG = "{% set s = 'a b' * 1000000 %}"
COSTLY = {
    "attribute": "{{ messages[0].__class__.__mro__ }}",
    "change": "{{ messages.append(1) }}",
    "underscore": "{% set ns = namespace() %}{% set ns.__x = 1 %}",
    "integer method": "{{ (1).to_bytes(10000000000) }}",
    "bytes": "{{ ('a'.encode() * 10000000000) | length }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "range": "{% for i in range(1000000) %}x{% endfor %}",
    "silent loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "loops of nothing": "{% for i in range(90000) %}{% for j in range(90000) if j > 90000 %}{% endfor %}{% endfor %}",
    "lists of loops": "{% for i in range(90000) %}{% set x = range(90000) | list %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macros for ever": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "loops in loops": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "text in loops": "{% set x %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "values in loops": "{% set s = 'a' * 10000 %}{% set x %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "joining": "{% set ns = namespace(s='a') %}"
    "{% for i in range(60) %}{% set ns.s = ns.s.join([ns.s] * 9) %}{% endfor %}",
    "replacing": "{% set ns = namespace(s='a') %}"
    "{% for i in range(9) %}{% set ns.s = ns.s.replace('a', 'a' * 99) %}{% endfor %}",
    "replace": "{% set s = 'a' * 99999 %}{{ s | replace('a', s) }}",
    "join": "{% set s = 'a' * 99999 %}{{ s | join(s) }}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "list times": "{{ [1] * 10 ** 10 }}",
    "list added": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "center": "{{ 'x'.center(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent precise": "{{ '%.9999999999f' % 1 }}",
    "percent argument": "{{ '%*d' % (10 ** 10, 1) }}",
    "percent key": "{{ '%(a(b))9999999999s' % {'a(b)': 1} }}",
    "percent again": "{% set s = 'a' * 99999 %}{{ ('%(a)s' * 9999) % {'a': s} }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "format mapping": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "format again": "{% set s = 'a' * 99999 %}{{ ('{0}' * 9999).format(s) }}",
    "json indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "json separators": "{{ messages | tojson(separators=('a' * 999999, ':')) }}",
    "indent": "{{ 'x' | indent(10 ** 10, true) }}",
    "indent text": "{{ ('\n' * 99999) | indent('a' * 99999, true, true) }}",
    "round": "{{ 1 | round(-10 ** 10) }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "product": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "digits": "{{ (10 ** 5000) | string }}",
    "hexadecimal": "{{ ('f' * 9999) | int(0, 16) }}",
    "split": LONG + "{{ s.split() | length }}",
    "splitlines": "{{ ('a\n' * 1100000).splitlines() | length }}",
    "characters": LONG + "{{ s | list | length }}",
    "search backwards": LONG + "{{ s.rfind('b' + s[:-9]) }}",
    "strip": LONG + "{{ s.strip('c' + s) }}",
    "search": LONG + "{% for i in range(9999) %}{{ 'c' in s }}{% endfor %}",
    "upper": LONG + "{% for i in range(9999) %}{% set x = s.upper() %}{% endfor %}",
    "slices": LONG + "{% for i in range(9999) %}{% set x = s[1:] %}{% endfor %}",
    "shared, written": DOUBLED + "{{ ns.x }}",
    "shared, concatenated": DOUBLED + "{{ 'a' ~ ns.x }}",
    "shared, as JSON": DOUBLED + "{{ ns.x | tojson }}",
    "shared, as string": DOUBLED + "{{ ns.x | string }}",
    "shared, formatted": DOUBLED + "{{ '%s' % (ns.x,) }}{{ '{}'.format(ns.x) }}",
    "shared, in an error": DOUBLED + "{{ raise_exception(ns.x) }}",
    "shared, as a view": DOUBLED + "{{ {'a': ns.x}.items() }}",
    "shared, compared": DOUBLED.replace("ns.x, ns.x]", "ns.x, ns.x] %}{% set ns.d = [ns.d, ns.d]")
    + "{{ ns.x == ns.d }}",
    "shared, found": DOUBLED + "{{ ns.x in [ns.x + []] }}",
    "shared, sorted": DOUBLED + "{{ [ns.x, ns.x + []] | sort | length }}",
    "shared, selected": DOUBLED + "{{ [ns.x] | select('eq', ns.x + []) | list | length }}",
    "nested, a key": NESTED + "{{ {ns.x: 1} | length }}",
    "nested, asked": NESTED + "{{ {}[ns.x] }}",
    "nested, got": NESTED + "{{ {}.get(ns.x) }}",
    "nested, unique": NESTED + "{{ [ns.x] | unique | list | length }}",
    "nested, unique of what is reversed": NESTED + "{{ [ns.x] | reverse | unique | list | length }}",
    "nested, in": NESTED + "{{ ns.x in {} }}",
    "nested, dict": NESTED + "{{ dict([(ns.x, 1)] | reverse) | length }}",
    "date": "{{ strftime_now('%Y' * 999) }}",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_template_that_does_too_much_is_stopped(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 1_000_000)
    began = time.thread_time()
    with pytest.raises(RequestError, match="chat_template: the model's template 'default' was stopped: ") as caught:
        template(COSTLY[kind]).render([USER])
    assert time.thread_time() - began < 5 and len(str(caught.value)) < 1200


def test_what_is_left_of_a_budget_does_not_count(monkeypatch: pytest.MonkeyPatch):
    costly = template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with monkeypatch.context() as patched, pytest.raises(RequestError, match="steps"):
        patched.setattr(template_sandbox, "MAX_STEPS", 1_000_000)
        costly.render([USER])
    assert template(CHATML).render(TURNS) == template(CHATML).render(TURNS)
    many = [USER, {"role": "assistant", "content": "words " * 100}] * 5000
    assert len(template(CHATML).render(many)) > 3_000_000


def test_what_templates_make_is_what_jinja_makes():
    source = (
        "{% macro given(n) %}{{ caller(n) }}{% endmacro %}{% set m = messages[0] %}"
        "{{ m.content[1:4] ~ 1 ~ none ~ m.content[::-1] }}|{{ 'a' in m, 'role' in m, 5 not in [5] }}|"
        "{{ '%-5s|%03d' % ('a', 7) }}|{{ '{:>4}{!r}{a[b]}'.format('x', 'y', a={'b': 2}) }}|"
        "{{ [3, 1, 2] | sort | join(', ') }}|{{ 'a b  c'.split() }}{{ 'a,b,c'.rsplit(',', 1) }}|"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|"
        "{% for k, v in m | dictsort %}{{ loop.index }}/{{ loop.length }}{{ k }}{{ k.replace('o', 'u') }}{% endfor %}|"
        "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ ',' if not loop.last }}{% else %}none{% endfor %}|"
        "{{ {'a': [1, (2,)]} }}|{{ 'x'.center(5) }}|{{ 'a-b' | replace('-', '+') | upper | indent(2, true) }}|"
        "{{ 7 // 2 * 2 ** 3 % 5 }}|{{ '<' | e + '<' }}|{% call(x) given(3) %}{{ x }}{% endcall %}"
    )
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert template(source).render([USER]) == plain.render(messages=[USER])


def test_lone_surrogates_are_replaced():
    assert (
        template("{{ '\\ud800' }}-{{ messages[0].content }}").render([{"role": "user", "content": "\udc00"}])
        == "\ufffd-\ufffd"
    )
    with pytest.raises(RequestError, match="messages: the chat template refused them: \ufffd"):
        template("{{ raise_exception('\\ud800') }}").render([USER])


BROKEN = {
    "syntax": "{% if %}",
    "parentheses": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "sum": "{{ 1" + " + 1" * 5000 + "}}",
    "loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "branches": "{% if a %}" * 120 + "{% endif %}" * 120,
    "break": "{% break %}",
    "filter": "{{ 1 | wordwrap(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "length": "x" * 300_000,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_does_not_compile_is_a_config_error(kind: str):
    with pytest.raises(ConfigError, match=r"chat_template: template 'default' (is no valid Jinja|does not compile): "):
        template(BROKEN[kind])


def test_broken_template_is_a_config_error():
    with pytest.raises(ConfigError, match="chat_template: template 'default' is no valid Jinja: line 2"):
        template("x\n{% for %}")


def test_model_without_template():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render([USER])
