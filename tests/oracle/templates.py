"""Writes tests/fixtures/templates.json: constructs of chat templates and what Jinja2 makes of them.

The environment is that of `transformers` (utils/chat_template_utils.py): trimmed blocks, loop controls, the
sandbox that changes nothing, `tojson` as json.dumps, `raise_exception`, and a `generation` block. No template here
is anybody's: each is a construct by itself.

    pip install jinja2==3.1.6
    python3 tests/oracle/templates.py
"""

import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTEXT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What's \"new\"?\r\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNothing – 你好 🙂"},
        {"role": "user", "content": "And\tnow?"},
    ],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    # Given as further arguments.
    "numbers": [3, 1, 2],
    "mixed": [1, 2.5, "a'b", 'q"', None, True, {"k": [False]}],
    "nested": {"b": {"z": 1, "a": [1, {"x": None}]}, "a": "ü🙂<&>", "c": 1e16},
    "people": [{"name": "Zoe", "age": 9}, {"name": "adam", "age": 40}, {"name": "Bob", "age": 9}],
    "text": "one two  three",
    "spaces": "\x1c \x85a\u00a0\x1f\u2003",
}

CASES = r"""
{{ none is iterable }}|{{ tools is iterable }}|{{ tools is none }}|{{ 1 is iterable }}|{{ 'x' is iterable }}
{{ 'x' is sequence }}|{{ none is sequence }}|{{ numbers is sequence }}|{{ nested is sequence }}|{{ nothing is sequence }}
{{ nothing|length }}|{{ numbers|length }}|{{ nested|count }}|{{ 'é🙂'|length }}
{{ [][::-1] }}|{{ ''[::-1] }}|{{ numbers[::-1] }}|{{ 'abc'[::-1] }}
{{ numbers[2:0:-1] }}|{{ 'abcdef'[4:1:-2] }}|{{ 'abcdef'[-2:-5:-1] }}|{{ numbers[5::-1] }}|{{ numbers[:0:-1] }}
{{ numbers[1:] }}|{{ numbers[:-1] }}|{{ numbers[-2:] }}|{{ 'abcdef'[1:5:2] }}|{{ 'abc'[7:] }}|{{ numbers[0:9] }}
{{ messages[1:][0].role }}|{{ messages[::-1][0]['role'] }}|{{ (messages[1:]|first).role }}
{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role[0] }}{% endfor %}
[{{ spaces|trim }}]|[{{ spaces.strip() }}]|[{{ spaces.lstrip() }}]|[{{ spaces.rstrip() }}]
[{{ 'xxabxx'.strip('x') }}]|[{{ 'xxabxx'|trim('x') }}]|[{{ '  a '.lstrip() }}]|[{{ 'abc'.rstrip('bc') }}]
{{ mixed }}
{{ nested }}
{{ {'a': (1, 2), 'b': ('x',), 'c': ()} }}|{{ (1, 'a') }}
{{ ["it's", 'a"b', "both'\"", 'back\\slash', 'tab\t', 'nl\n', '\x07', 'é', '\u200b', '\x85'] }}
{{ [1.0, 0.1, 1e16, 1e-5, 123456789.125, -0.0, 1e15, 3.0e100] }}|{{ 1.0 }}|{{ 2 / 4 }}|{{ 10 / 5 }}
{{ true }}|{{ none }}|{{ [true, none, false] }}|{{ 'a' ~ true ~ none ~ 1.0 ~ [1, 'b'] ~ {'c': none} }}
{{ mixed|string }}|{{ nested|string|length }}|{{ 1.5|string ~ 'x' }}|{{ true|string }}
{{ mixed|join(', ') }}|{{ ['a', 1, none]|join }}|{{ people|join('/', attribute='name') }}|{{ people|map(attribute='age')|join('+') }}
{{ nested|tojson }}
{{ nested|tojson(indent=2) }}
{{ nested|tojson(ensure_ascii=True) }}|{{ nested|tojson(true) }}
{{ nested|tojson(sort_keys=true) }}|{{ nested|tojson(sort_keys=True, indent=4) }}
{{ nested|tojson(separators=(',', ':')) }}|{{ mixed|tojson(separators=(', ', ' = '), indent=1) }}
{{ [1.0, 1e16, 1e-7, 'a\u007f\b\f\x01', {}, [], {'1': []}]|tojson }}|{{ [[], {}]|tojson(indent=2) }}
{{ {1: 'a', none: 'b', false: 'c'}|tojson }}|{{ 'a<b>&\'"'|tojson }}|{{ (1, 2)|tojson }}
{{ messages[1]|tojson }}|{{ messages[2].content|tojson(ensure_ascii=true) }}|{{ none|tojson }}
{{ [1, [2]]|tojson(indent='--') }}|{{ numbers|tojson(indent=0) }}
{{ 'a=b=c'.partition('=') }}|{{ 'a=b=c'.rpartition('=') }}|{{ 'abc'.partition('=') }}|{{ 'abc'.rpartition('=') }}
{{ text.split() }}|{{ text.split(' ') }}|{{ text.split(none, 1) }}|{{ text.rsplit(' ', 1) }}|{{ text.rsplit(maxsplit=1) }}
{{ '  a  b '.split() }}|{{ '  a  b '.split(none, 1) }}|{{ '  a  b '.rsplit(none, 1) }}|{{ ''.split() }}|{{ ''.split(',') }}
{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.rsplit(',', 1) }}|{{ 'a,b,c'.split(',')[-1] }}|{{ 'a,b,c'.split(sep=',', maxsplit=0) }}
{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}|{{ messages[2].content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}
{{ 'prefix-x'.removeprefix('prefix-') }}|{{ 'x.txt'.removesuffix('.txt') }}|{{ 'x'.removeprefix('y') }}
{{ 'hello'.index('l') }}|{{ 'hello'.rindex('l') }}|{{ 'hello'.find('z') }}|{{ 'hello'.rfind('l') }}|{{ 'é🙂x'.find('x') }}|{{ 'hello'.find('l', 3) }}
{{ 'hello'.count('l') }}|{{ 'hello'.count('') }}|{{ [1, 2, 1].count(1) }}|{{ numbers.index(2) }}
{{ numbers.copy() }}|{{ nested.copy()['a'] }}|{{ numbers|list }}|{{ 'ab'|list }}|{{ nested|list }}
{{ '42'.zfill(5) }}|{{ '-42'.zfill(5) }}|{{ '+1'.zfill(1) }}|{{ 'é'.zfill(3) }}
[{{ 'ab'.ljust(5) }}]|[{{ 'ab'.rjust(5, '*') }}]|[{{ 'ab'.center(5) }}]|[{{ 'abc'.center(6, '-') }}]|[{{ 'abc'|center(8) }}]
{{ 'hELLO wORLD'.title() }}|{{ "they're bill's".title() }}|{{ "they're bill's"|title }}|{{ 'a-b c(d'|title }}|{{ 'hELLO'|capitalize }}|{{ 'hELLO'.capitalize() }}
{{ 'aBc'.swapcase() }}|{{ 'ABC'.lower() }}|{{ 'straße'.upper() }}|{{ 'ABC'|lower }}|{{ 1|upper }}|{{ none|lower }}
{{ 'abc'.isupper() }}|{{ 'ABC1'.isupper() }}|{{ '1'.isupper() }}|{{ 'ab1'.isalnum() }}|{{ ''.isalpha() }}|{{ '12'.isdigit() }}|{{ '²'.isdigit() }}|{{ '½'.isdigit() }}|{{ ' \t'.isspace() }}|{{ ''.isspace() }}
{{ 'abc'.startswith('ab') }}|{{ 'abc'.startswith(('x', 'a')) }}|{{ 'abc'.endswith('bc', 1) }}|{{ 'abc'.startswith('b', 1) }}|{{ 'abc'.endswith(()) }}
{{ 'a\nb\r\nc\x0bd\x1ce\u2028f'.splitlines() }}|{{ 'a\n\nb\n'.splitlines(true) }}|{{ ''.splitlines() }}
{{ 'aaa'.replace('a', 'b', 2) }}|{{ 'aaa'|replace('a', 'b', 1) }}|{{ 'abc'.replace('', '-') }}|{{ 1|replace(1, 2) }}
{{ ', '.join(['a', 'b']) }}|{{ ''.join(messages|map(attribute='role')) }}|{{ 'a\tbc\td'.expandtabs(4) }}
{{ 'x={} y={:>4} {name}'.format(1, 'a', name='n') }}|{{ '{0}{1}{0}'.format('a', 'b') }}|{{ '{:.2f}'.format(1.005) }}
{{ '%s and %s' % ('a', 1) }}|{{ '%d%%' % 42 }}|{{ '%5.2f|%-5s|%05d|%x' % (3.14159, 'ab', 42, 255) }}|{{ '%s' % numbers }}
{{ '%s' % 'x' ~ 'y' }}|{{ 'a' ~ '%s' % 'b' ~ 'c' }}|{{ 7 % 3 }}|{{ -7 % 3 }}|{{ 7 % -3 }}|{{ 7.5 % 2 }}|{{ 2 * 7 % 4 + 1 }}|{{ '%s' % none }}
{{ '%(a)s-%(b)d' % {'a': 'x', 'b': 2} }}|{{ '%s, %s'|format('a', 'b') }}|{{ '%s'|format(none) }}
{{ text|truncate(9) }}|{{ text|truncate(9, true) }}|{{ text|truncate(5, false, '…') }}|{{ text|truncate(12) }}|{{ text|truncate(6, leeway=0) }}
{{ text|wordcount }}|{{ "it's a-b _c"|wordcount }}|{{ ''|wordcount }}
{{ 'a\nb\n\nc'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb\n'|indent(2, blank=true) }}|{{ 'a\nb'|indent('> ') }}
{{ numbers|sort }}|{{ numbers|sort(reverse=true) }}|{{ ['b', 'A', 'c']|sort }}|{{ ['b', 'A', 'c']|sort(case_sensitive=true) }}|{{ people|sort(attribute='age')|map(attribute='name')|list }}|{{ people|sort(true, attribute='name')|map(attribute='name')|join }}
{{ ['b', 'B', 'a', 'b']|unique|list }}|{{ people|unique(attribute='age')|map(attribute='name')|list }}|{{ numbers|min }}{{ numbers|max }}|{{ numbers|sum }}|{{ people|sum('age') }}|{{ [1, 2.5]|sum(start=1) }}
{{ nested|dictsort|map('first')|list }}|{{ {'b': 1, 'A': 2}|dictsort }}|{{ {'b': 1, 'A': 2}|dictsort(by='value', reverse=true) }}
{{ {'b': 1, 'A': 2}.items()|list }}|{{ {'b': 1}|items|list }}|{{ nested.keys()|list }}|{{ {'a': 1}.values()|list }}|{{ nested.get('x') }}|{{ nested.get('x', 'y') }}|{{ nested.get('a') }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in nested|dictsort %}{{ k }}{% endfor %}
{{ numbers|batch(2)|list }}|{{ numbers|batch(2, 'x')|list }}|{{ numbers|slice(2)|list }}|{{ [1,2,3,4,5]|slice(3, '-')|list }}
{{ numbers|first }}|{{ numbers|last }}|{{ []|first is defined }}|{{ 'abc'|first }}{{ 'abc'|last }}|{{ 'abc'|reverse }}|{{ numbers|reverse|list }}
{{ '42'|int }}|{{ 'x'|int }}|{{ 'x'|int(7) }}|{{ '3.9'|int }}|{{ 3.9|int }}|{{ '0x1f'|int(base=16) }}|{{ ' 5 '|int }}|{{ none|int }}|{{ true|int }}
{{ '1.5'|float }}|{{ 'x'|float }}|{{ 'x'|float(2.5) }}|{{ 3|float }}|{{ '1e3'|float }}
{{ 2.5|round }}|{{ 3.5|round }}|{{ 2.675|round(2) }}|{{ 42|round }}|{{ 2.1|round(0, 'ceil') }}|{{ 2.987|round(1, 'floor') }}|{{ 1234|round(-2) }}|{{ -3|abs }}
{{ nothing|default('d') }}|{{ ''|default('d') }}|{{ ''|default('d', true) }}|{{ none|d('x') }}|{{ none|d('x', boolean=true) }}|{{ nothing|d }}
{{ people|selectattr('age', 'equalto', 9)|map(attribute='name')|list }}|{{ people|rejectattr('age', 'gt', 9)|list|length }}|{{ [1, none, 2]|select|list }}|{{ [1, 2, 3]|reject('odd')|list }}|{{ messages|selectattr('role', 'in', ['user'])|list|length }}
{{ people|map('length')|list }}|{{ ['a', 'b']|map('upper')|join }}|{{ people|map(attribute='zip', default='-')|join }}
{% for group in people|groupby('age') %}{{ group.grouper }}:{{ group.list|map(attribute='name')|join(',') }};{% endfor %}
{{ raise_exception is callable }}|{{ 1 is callable }}|{{ nothing is callable }}|{{ messages is callable }}
{{ 1 is number }}|{{ 1.0 is float }}|{{ 1 is integer }}|{{ true is integer }}|{{ true is number }}|{{ true is boolean }}|{{ 1 is true }}|{{ false is false }}|{{ 'a' is mapping }}|{{ nested is mapping }}
{{ 4 is even }}|{{ 3 is odd }}|{{ 9 is divisibleby 3 }}|{{ 9 is divisibleby(2) }}|{{ 'a' is lower }}|{{ 'A1' is upper }}|{{ 1 is in numbers }}|{{ 'x' is not in 'xyz' }}|{{ 1 is sameas 1 }}|{{ 2 is eq 2 }}|{{ 2 is gt 1 }}
{{ nothing is defined }}|{{ nested.x is defined }}|{{ nested.a is defined }}|{{ nothing is none }}|{{ nothing }}|[{{ nested.nope }}]|{{ messages[9] is defined }}
{{ 1 + 2 * 3 ** 2 }}|{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 1 - -1 }}|{{ 'a' + 'b' * 3 }}|{{ [1] + [2, 3] }}|{{ [0] * 3 }}|{{ 2 ** 10 }}|{{ (1 + 2) * 3 }}|{{ 3 * 'ab' }}
{{ 1 == 1.0 }}|{{ true == 1 }}|{{ 'a' == 'a' }}|{{ [1, 2] == [1, 2] }}|{{ {'a': 1} == {'a': 1} }}|{{ none == false }}|{{ 1 != 2 }}|{{ 'a' < 'b' }}|{{ 1 < 2 < 3 }}|{{ nothing == none }}
{{ 'a' in 'abc' }}|{{ 'role' in messages[0] }}|{{ 1 in numbers }}|{{ 9 not in numbers }}|{{ 'x' in [] }}|{{ 'a' in nothing }}
{{ 'a' or 'b' }}|{{ '' or 'b' }}|[{{ text[:0] and 1 }}]|{{ text and 'b' }}|{{ not 0 }}|{{ not [] or false }}|{{ none or nothing or 'z' }}
{{ 'yes' if numbers else 'no' }}|{{ 'yes' if [] else 'no' }}|[{{ 'yes' if false }}]|{{ 1 if a is defined else 2 if b is defined else 3 }}
{{ 'a' 'b' "c" }}|{{ 'tab\there' }}|{{ '\x41\u00e9\101' }}|{{ "q\"q" }}|{{ '\d' }}|{{ 'line\
continued' }}
{% set ns = namespace(n=0, found=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.found }}
{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}|{% if true %}{% set y = 5 %}{% endif %}{{ y }}
{% set a, b = 1, 'two' %}{{ a }}{{ b }}|{% set t = 1, 2 %}{{ t }}|{% set c %}  block {{ a }} {% endset %}[{{ c }}]|{% set d | upper %}up{% endset %}{{ d }}
{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }} {% endfor %}
{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{{ m.role }}{% else %}none{% endfor %}|{% for x in [] %}x{% else %}empty{% endfor %}
{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% elif loop.index == 4 %}{% break %}{% endif %}{{ m.role }}{% endfor %}|{% for i in range(2, 8, 3) %}{{ i }}{{ loop.cycle('a', 'b') }}{% endfor %}
{% macro show(role, content='-', end='.') %}[{{ role }}:{{ content }}{{ end }}]{% endmacro %}{{ show('a') }}{{ show('b', end='!') }}{{ show(content='c', role='r') }}
{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% call wrap('b') %}in{% endcall %}|{{ 'a' if caller is defined else 'b' }}
{% for node in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ node.n }}({{ loop(node.c) }}){% endfor %}
{% filter upper %}abc{% endfilter %}|{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}|{% raw %}{{ raw }}{% endraw %}|{# comment #}x
{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}
  {% if true %}
 x
  {% endif %}
y
{%- if true -%}   z   {%- endif %}  w
{{ 'a' }}   {{- 'b' -}}   c
  {%+ if true %}kept{% endif %}
{{ messages[0]['role'] }}|{{ messages[-1].content }}|{{ messages[0].get('name', 'none') }}|{{ 'name' in messages[0] }}|{{ messages[0].content[:2] }}|{{ messages[2]['content'][-1] }}
{% for c in 'ab' %}{{ c }}.{% endfor %}{% for i in 1, 2 %}{{ i }}{% endfor %}{% for i in nothing %}{{ i }}{% endfor %}|{{ dict(a=1, b='x') }}|{{ range(3)|list }}
{{ '<a & "b">'|escape }}|{{ "it's"|e }}|{{ '<b>'|safe }}|{{ 1e3|int }}|{{ 1_000 }}|{{ 0.5 }}|{{ [1, 2,] }}|{{ {'a': 1,} }}
{{ bos_token + messages[0].content.strip() + eos_token }}|{{ bos_token ~ 1 ~ eos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 1) %}
        {{- 'odd ' }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}
"""

# Several lines that belong together, by the line they begin with.
JOINED = [
    ("  {% if true %}\n x", 4),
    ("{%- for message in messages %}\n", 9),
    ("{{ 'a' 'b' \"c\" }}", 2),
]

# What has to be refused: the message of a template, an unknown name, a wrong type.
REFUSED = [
    "{{ raise_exception('Only user turns!') }}",
    "{{ nothing.attribute }}",
    "{{ nothing + 'a' }}",
    "{{ 'a' + 1 }}",
    "{{ 'a'|unheard_of }}",
    "{{ 'a' is unheard_of }}",
    "{{ unheard_of() }}",
    "{{ 'a'.unheard_of() }}",
    "{{ numbers.append(4) }}",
    "{{ nested.update({'a': 1}) }}",
    "{{ nothing|tojson }}",
    "{{ none|length }}",
    "{{ 'abc'.index('z') }}",
    "{{ numbers[::0] }}",
    "{{ '%d' % 'x' }}",
    "{{ '%s %s' % ('a',) }}",
    "{{ 1 % 0 }}",
    "{{ 'a'.join([1]) }}",
    "{% for x in none %}{% endfor %}",
    "{% for x in 5 %}{% endfor %}",
    "{% include 'x' %}",
    "{% do 1 %}",
    "{{ numbers|tojson(unheard_of=1) }}",
    "{{ 'a'.strip('a', 'b') }}",
    "{% set nested.x = 1 %}",
    "{% if %}{% endif %}",
    "{{ 1",
    "{% for x in numbers %}",
]


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training and renders what is in it."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _render(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def constructs():
    """The cases, one a line but for those that are joined."""
    lines = CASES.strip("\n").split("\n")
    while lines:
        text = "\n".join(lines)
        count = next((n for start, n in JOINED if text.startswith(start)), 1)
        yield "\n".join(lines[:count])
        del lines[:count]
    yield "a\r\n{% if true %}\r\nb\r\n{% endif %}\rc\r\n"
    yield "one line end at the end goes\n\n"


def main():
    env = environment()
    cases = []
    for template in constructs():
        expected = env.from_string(template).render(**CONTEXT)
        cases.append({"template": template, "expected": expected})
    for template in REFUSED:
        try:
            found = env.from_string(template).render(**CONTEXT)
        except Exception:
            continue
        raise SystemExit(f"Jinja2 accepts {template!r}: {found!r}")
    document = {"context": CONTEXT, "cases": cases, "refused": REFUSED}
    path = pathlib.Path(__file__).parent.parent / "fixtures" / "templates.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=True) + "\n")
    print(f"{path}: {len(cases)} templates, {len(REFUSED)} refused")


if __name__ == "__main__":
    main()
