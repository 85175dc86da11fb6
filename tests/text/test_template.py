from __future__ import annotations

import threading
import time
from datetime import datetime

import pytest
import templates_for_tests as templates
from transformers.utils.chat_template_utils import render_jinja_template

from mlxgen.errors import TemplateError
from mlxgen.template import ChatTemplate, TemplateRefusal

NOW = datetime(2031, 5, 6)
BIG = "{% set b = 'a' * 1000000 %}"
DOUBLE = "{% set ns = namespace(x=X) %}{% for i in range(64) %}{% set ns.x = Y %}{% endfor %}"


def _double(start: str, step: str, end: str) -> str:
    return DOUBLE.replace("X", start).replace("Y", step) + end


BOMBS = {
    "multiplied text": "{{ 'a' * 2000000000 }}",
    "multiplied list": "{{ ([0] * 999999999)|length }}",
    "power": "{{ 9 ** 99999999 }}",
    "squared again and again": _double("2 ** 64", "ns.x * ns.x", "{{ ns.x }}"),
    "doubled text": _double("'aaaa'", "ns.x + ns.x", "{{ ns.x|length }}"),
    "concatenated text": _double("'aaaa'", "ns.x ~ ns.x", "{{ ns.x|length }}"),
    "doubled list": _double("[1]", "ns.x + ns.x", "{{ ns.x|length }}"),
    "nested lists printed": _double("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested lists as json": _double("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "percent width": "{{ '%999999999d' % 1 }}",
    "computed percent width": "{{ '%*d' % (999999999, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "computed format width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(width)|length }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(10000) }}",
    "center": "{{ 'a'|center(999999999) }}",
    "indent": "{{ ('\n' * 1000000)|indent(10000) }}",
    "batch": "{{ 'a'|batch(999999999, 'x')|list }}",
    "json indent": "{{ [1]|tojson(indent=999999999) }}",
    "replace method": BIG + "{{ b.replace('', b) }}",
    "replace filter": BIG + "{{ b|replace('', b) }}",
    "join filter": BIG + "{{ range(99999)|join(b) }}",
    "join method": BIG + "{{ b.join(b) }}",
    "slices": "{% set b = 'a' * 60000000 %}" + "".join(f"{{% set c{n} = b[1:] %}}" for n in range(40)),
    "output": BIG + "{% for i in range(99999) %}{{ b }}{% endfor %}",
    "captured output": BIG + "{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}{{ x|length }}",
    "captured text": "{% set x %}{% for i in range(99999) %}" + "z" * 10_000 + "{% endfor %}{% endset %}",
    "macro output": BIG + "{% macro f() %}{{ b }}{% endmacro %}{% for i in range(99999) %}{{ f()|length }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "sum of lists": "{{ range(9999)|map('list')|sum(start=[]) }}",
    "date": "{{ strftime_now('%999999999Y') }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_templates_that_make_something_huge_are_stopped_before_they_do(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(BOMBS[name]).render({"width": 10**9}, NOW)
    assert time.monotonic() - start < 8
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, TemplateRefusal)


LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "filters": "{{ range(99999)|select('in', range(99999)|list)|list|length }}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_endless_templates_are_stopped_by_the_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.template.MAX_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"0\.3 seconds"):
        ChatTemplate(LOOPS[name]).render({}, NOW)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ [].append(1) }}",
        "{{ messages.pop() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'a'.translate({97: 'b'}) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render({"messages": [1]}, NOW)


def test_refusals_and_broken_templates() -> None:
    with pytest.raises(TemplateRefusal, match="no system"):
        ChatTemplate("{{ raise_exception('no\n system') }}").render({}, NOW)
    with pytest.raises(TemplateRefusal, match="no element"):
        ChatTemplate("{{ messages[3].content }}").render({"messages": []}, NOW)
    with pytest.raises(TemplateError, match="valid Jinja"):
        ChatTemplate("{% if %}")
    with pytest.raises(TemplateError, match="limit"):
        ChatTemplate("x" * (5 << 20))


FEATURES = """
{%- macro show(x, pre='-') -%}{{ pre ~ x|upper }}{{ caller() if caller }}{%- endmacro -%}
{%- set ns = namespace(total=0, self='s') -%}
{% for message in messages if message.role != 'tool' -%}
    {%- if loop.index0 == 5 %}{% break %}{% endif -%}
    {%- if loop.index0 == 1 %}{% continue %}{% endif -%}
    {{ loop.index }}{{ loop.cycle('a', 'b') }}:{{ message['role']|title }}={{ message.content|trim|replace('a', 'bb') }}
    {%- set ns.total = ns.total + message.content|length -%}
{% else %}none{% endfor %}
{% generation %}{{ show('g') }}{% endgeneration %}
{{ ns.total * 2 ** 3 // 5 % 7 }} {{ 'x' * 3 }} {{ '%s-%5.1f' % ('a', 2) }} {{ '{:>5}|{}'.format('ab', 1) }}
{{ messages|map(attribute='role')|join(', ') }} {{ messages[0:2]|length }} {{ messages[::-1][0].content[1:-1] }}
{{ messages|selectattr('role', 'equalto', 'user')|list|tojson(indent=2) }}
{{ {'a': [1, None, true], 'é': '<&>'}|tojson }}
{% call show('c') %}inner{% endcall %} {% filter upper %}shout{% endfilter %} {{ tools is none }} {{ x is defined }}
{{ ['b', 'a']|sort|first }} {{ 'a,b'.split(',')[-1] }} {{ dict(a=1).items()|list }} {{ ' x '.strip()|indent(2) }}
    {{ 'text' in 'context' and not false or none }} {{ range(3)|sum }} {{ 5|string ~ 6 }} {{ 'a' < 'b' }}
{{ 3.7|round|int }}
{% set captured %}cap{{ 1 }}{% endset %}{{ captured }} {{ messages[0] | items | list }}
{{ "%d" | format(3) }} {{ ns.self }}
"""


@pytest.mark.parametrize("source", [FEATURES, *templates.ALL.values()])
def test_what_is_rendered_is_what_transformers_renders(source: str) -> None:
    messages = [
        {"role": "user", "content": " banana \n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "é 你好"},
    ]
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert ChatTemplate(source).render({**variables, "bos_token": "<s>", "eos_token": "</s>"}, NOW) == theirs[0]


def test_the_date_is_the_callers() -> None:
    assert ChatTemplate("{{ strftime_now('%d %B %Y') }}").render({}, NOW) == "06 May 2031"


def test_long_conversations_are_well_within_the_limits() -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": "word " * 400} for n in range(1000)]
    text = ChatTemplate(templates.THINKING).render({"messages": messages, "add_generation_prompt": True}, NOW)
    assert len(text) > 2_000_000


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ word }}{% endfor %}")
    results: list[bool] = []

    def run(word: str) -> None:
        results.append(template.render({"word": word}, NOW) == word * 2000)

    threads = [threading.Thread(target=run, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6
