"""What JSON schemas must be to become a grammar. `grammar.py` asks before llguidance reads one, servers before that.

Refused is what llguidance reads wrongly, or for too long, and what no document of any length can satisfy.
"""

from collections.abc import Iterator
from typing import Any

from jhybrid.errors import RequestError

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_BOUND = 2**53
MAX_DEPTH = 100
"""Levels of a schema; llguidance reads little more."""
MAX_KEYS = 3000
"""Of one object. What llguidance needs grows with their square; it is some seconds for these."""
MAX_PATTERNS = 64
"""Of an object's keys; each is held against every other."""
MAX_ALL_KEYS = 5000
"""Of all objects of a schema, as OpenAI has it."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords with schemas under names of the author's."""
DATA = ("const", "enum", "default", "examples")
"""Keywords with values, in which nothing is a keyword."""


def check_schema(field: str, schema: Any) -> None:
    """Raises RequestError of this field for a schema that is too deep or too large, has bounds of numbers that
    llguidance rounds, or overflows its stack on, or asks for a document without end."""
    _check_nesting(field, schema)
    keys = 0
    for path, part in _schemas(schema):
        names = {name for name in _list(part.get("required")) if isinstance(name, str)} | set(
            _mapping(part.get("properties"))
        )
        patterns = len(_mapping(part.get("patternProperties")))
        for count, what, most in ((len(names), "keys", MAX_KEYS), (patterns, "patternProperties", MAX_PATTERNS)):
            if count > most:
                raise RequestError(
                    field, f"{_at(path)}an object has {count} {what}, at most {most} allowed; give fewer"
                )
        keys += len(names)
    if keys > MAX_ALL_KEYS:
        raise RequestError(field, f"its objects have {keys} keys, at most {MAX_ALL_KEYS} allowed; leave some out")
    path = _Endings(schema).endless()
    if path is not None:
        raise RequestError(field, f"{_at(path)}it requires itself, so no text ends; do not require it, or allow null")


def moved(schema: Any, to: str) -> Any:
    """A schema for another place: what refers to its root refers to `to`, a pointer as `#/$defs/name`."""
    if isinstance(schema, list):
        return [moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = to + value[1:]
        elif key in NAMED and isinstance(value, dict):
            value = {name: moved(each, to) for name, each in value.items()}
        elif key not in DATA:
            value = moved(value, to)
        found[key] = value
    return found


def _check_nesting(field: str, schema: Any) -> None:
    left = [("", schema, 0)]
    while left:
        path, part, depth = left.pop()
        if depth > MAX_DEPTH:
            raise RequestError(field, f"is nested more than {MAX_DEPTH} levels deep; flatten it with $defs and $ref")
        if isinstance(part, dict):
            for key, value in part.items():
                if key in BOUNDS and isinstance(value, int | float) and abs(value) > MAX_BOUND:
                    what = f"{key} {value} is not in [-2^53, 2^53], where numbers are exact; narrow it"
                    raise RequestError(field, f"{_at(path[1:])}{what}")
                left.append((f"{path}.{key}", value, depth + 1))
        elif isinstance(part, list):
            left += [(f"{path}[{at}]", each, depth + 1) for at, each in enumerate(part)]


def _schemas(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside one, itself included, by its path."""
    left = [("", root)]
    while left:
        path, part = left.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            inner = f"{path}.{key}".lstrip(".")
            if key in NAMED:
                left += [(f"{inner}.{name}", each) for name, each in _mapping(value).items()]
            elif key not in DATA:
                left += [(f"{inner}[{at}]", each) for at, each in enumerate(_list(value))]
                left.append((inner, value))


class _Endings:
    """Which schemas inside one a document can satisfy that ends. What is not sure counts as one.

    A schema with `left` parts that must end first waits for them; `anyOf` waits for one of its own. Whoever still waits
    when everybody has been told requires itself. Time is linear in the schema's size.
    """

    def __init__(self, root: Any):
        self._root = root
        self._left: dict[int, int] = {}  # by id; the schemas live as long as their root
        self._waiting: dict[int, list[int]] = {}
        self._all = list(_schemas(root))
        self._known = {id(part) for _, part in self._all}
        ready = []
        for _, part in self._all:
            parts = list(self._needs(part))
            for need in parts:
                self._waits(id(part), need)
            self._left[id(part)] = len(parts)
            ready += [] if parts else [id(part)]
        while ready:
            for who in self._waiting.pop(ready.pop(), ()):
                self._left[who] -= 1
                ready += [who] if self._left[who] == 0 else []

    def endless(self) -> str | None:
        """Path of the first schema that requires itself."""
        return next((path for path, part in reversed(self._all) if self._left[id(part)] > 0), None)

    def _waits(self, who: int, need: Any) -> None:
        if isinstance(need, dict):
            self._waiting.setdefault(id(need), []).append(who)
            return
        self._left[id(need)] = 1  # a list, of which one is enough
        self._waiting.setdefault(id(need), []).append(who)
        for each in need:
            self._waiting.setdefault(id(each), []).append(id(need))

    def _needs(self, part: dict[str, Any]) -> Iterator[Any]:
        """Schemas that must end for this one to, and lists of which one must."""
        if "const" in part or "enum" in part:
            return
        target = self._target(part.get("$ref"))
        if isinstance(target, dict):
            yield target
        yield from (each for each in _list(part.get("allOf")) if isinstance(each, dict))
        for key in ("anyOf", "oneOf"):
            options = _list(part.get(key))
            if options and all(isinstance(each, dict) for each in options):
                yield options
        kinds = part.get("type")
        if kinds in ("object", ["object"]):
            yield from (each for each in self._properties(part) if isinstance(each, dict))
        if kinds in ("array", ["array"]) and isinstance(least := part.get("minItems"), int):
            first = _list(part.get("prefixItems"))[: max(0, least)]
            yield from (each for each in first if isinstance(each, dict))
            if least > len(first) and isinstance(part.get("items"), dict):
                yield part["items"]

    def _properties(self, part: dict[str, Any]) -> Iterator[Any]:
        known, others = _mapping(part.get("properties")), part.get("additionalProperties")
        required = [name for name in _list(part.get("required")) if isinstance(name, str)]
        plain = not part.get("patternProperties")
        yield from (known[name] for name in required if name in known)
        least = part.get("minProperties")
        needs_more = isinstance(least, int) and least > len(known)
        if plain and (needs_more or any(name not in known for name in required)):
            yield others

    def _target(self, pointer: Any) -> Any:
        """What a reference inside of the schema points at; None where that is nothing."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        found = self._root
        for name in pointer[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found if id(found) in self._known else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(path: str) -> str:
    return f"at {path}: " if path else ""
