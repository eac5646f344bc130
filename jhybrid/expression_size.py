"""How large regexes and grammars are once their counted repetitions are written out. `grammar.py` bounds it.

llguidance's own limits do not count this, and `(a{1000}){1000}` costs it seconds.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

REGEX = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|\{(?P<count>\d+(?:,\d*)?)\}|.", re.DOTALL)
LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?P<regex>(?:\\.|[^/\\\n])+)/|(?P<name>[A-Za-z_]\w*)|\{(?P<count>\d+(?:,\d*)?)\}|[()]'
)
RULE = re.compile(r"^[ \t]*([A-Za-z_]\w*)(?:\[[^\n]*?\])?[ \t]*:", re.MULTILINE)


def regex_size(text: str) -> int:
    """Characters and classes of a regex, written out."""
    return _size(REGEX.finditer(text), lambda _: 1)


def lark_size(text: str) -> int:
    """That of the largest rule, with what the rules stand for that it names."""
    starts = list(RULE.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    bodies = {start[1]: text[start.end() : end] for start, end in zip(starts, ends, strict=True)}
    sizes: dict[str, int] = {}

    def of_rule(name: str) -> int:
        if name not in sizes:
            sizes[name] = 1  # what names itself is a rule of the parser, and not written out
            sizes[name] = _size(LARK.finditer(bodies.get(name, "")), of_atom)
        return sizes[name]

    def of_atom(found: re.Match[str]) -> int:
        if found["regex"] is not None:
            return regex_size(found["regex"])
        return of_rule(found["name"]) if found["name"] is not None else max(1, len(found[0]) - 2)

    return max(map(of_rule, bodies), default=0)


def schema_size(schema: Any) -> int:
    """That of the largest pattern in a JSON schema."""
    largest, left = 0, [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            patterns = [part.get("pattern"), *(part.get("patternProperties") or ())]
            largest = max([largest, *(regex_size(each) for each in patterns if isinstance(each, str))])
            left += part.values()
        elif isinstance(part, list):
            left += part
    return largest


def _size(found: Iterable[re.Match[str]], of_atom: Callable[[re.Match[str]], int]) -> int:
    totals, last = [0], 0
    for each in found:
        if each[0] == "(":
            totals.append(0)
            last = 0
            continue
        if each[0] == ")":
            last = totals.pop() if len(totals) > 1 else 0
        elif each["count"] is not None:
            times = max(int(number) for number in each["count"].split(",") if number)
            totals[-1] += last * (max(1, times) - 1)
            last *= max(1, times)
            continue
        else:
            last = of_atom(each)
        totals[-1] += last
    return sum(totals)
