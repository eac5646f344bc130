"""Which schemas have documents that end, against trying to write one; and what references point at after a move."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhybrid.errors import RequestError
from jhybrid.schema_limits import check_schema, moved

NODE = {"$ref": "#/$defs/node"}
ENDING: dict[str, Any] = {
    "a list": {"type": "object", "properties": {"next": {"anyOf": [NODE, {"type": "null"}]}}, "required": ["next"]},
    "optional": {"type": "object", "properties": {"child": NODE}},
    "no kind": {"properties": {"child": NODE}, "required": ["child"]},
    "another kind": {"type": ["object", "null"], "properties": {"child": NODE}, "required": ["child"]},
    "a tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": NODE}},
        "required": ["children"],
    },
    "a known value": {"const": {"properties": {"$ref": "#"}}},
    "a name like a keyword": {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
    "elsewhere": {"$ref": "https://example.org/schema"},
    "nowhere": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]},
}
ENDLESS: dict[str, Any] = {
    "required": {"type": "object", "properties": {"child": NODE}, "required": ["child"]},
    "every option": {"anyOf": [NODE, {"type": "array", "minItems": 1, "items": NODE}]},
    "all of": {"allOf": [{"type": "object"}, NODE]},
    "items": {"type": ["array"], "minItems": 2, "prefixItems": [{}], "items": NODE},
    "any name": {"type": "object", "additionalProperties": NODE, "minProperties": 1},
    "an option": {
        "anyOf": [
            {"type": "null"},
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/node/anyOf/1"}}, "required": ["a"]},
        ]
    },
}


@pytest.mark.parametrize("node", ENDING.values(), ids=ENDING)
def test_schemas_with_documents_that_end_are_taken(node: dict[str, Any]):
    check_schema("schema", {"$defs": {"node": node}, **NODE})


@pytest.mark.parametrize("node", ENDLESS.values(), ids=ENDLESS)
def test_schemas_that_require_themselves_are_refused(node: dict[str, Any]):
    with pytest.raises(RequestError, match=r"^schema: at \$defs\.node.*: it requires itself") as refused:
        check_schema("schema", {"$defs": {"node": node}, **NODE})
    assert refused.value.field == "schema"


def ends(schema: Any, root: Any, depth: int) -> bool:
    """Whether a document of at most so many levels satisfies a schema of `graphs`, by its definition."""
    if depth < 0:
        return False
    if "$ref" in schema:
        return ends(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth - 1)
    if "anyOf" in schema:
        return any(ends(each, root, depth - 1) for each in schema["anyOf"])
    return all(ends(schema["properties"][name], root, depth - 1) for name in schema.get("required", ()))


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Schemas that refer to each other."""
    names = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    refs = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in names])
    parts = st.one_of(refs, st.just({"type": "null"}), st.builds(lambda *x: {"anyOf": list(x)}, refs, refs))
    objects = st.builds(
        lambda a, b, required: {"type": "object", "properties": {"a": a, "b": b}, "required": required},
        parts,
        parts,
        st.lists(st.sampled_from(["a", "b"]), unique=True),
    )
    return {"$defs": {name: draw(st.one_of(objects, parts)) for name in names}}


@settings(deadline=None, max_examples=200)
@given(graphs())
def test_refused_is_what_no_document_satisfies(root: dict[str, Any]):
    satisfiable = all(ends(each, root, 24) for each in root["$defs"].values())
    try:
        check_schema("schema", root)
    except RequestError:
        assert not satisfiable
    else:
        assert satisfiable


def test_references_follow_a_schema_that_is_moved():
    schema = {
        "properties": {"$ref": {"$ref": "#/$defs/x"}, "b": {"anyOf": [{"$ref": "#"}, {"$ref": "http://a/#/b"}]}},
        "enum": [{"$ref": "#"}],
        "$defs": {"x": {"const": {"$ref": "#"}}},
    }
    assert moved(schema, "#/to") == {
        "properties": {"$ref": {"$ref": "#/to/$defs/x"}, "b": {"anyOf": [{"$ref": "#/to"}, {"$ref": "http://a/#/b"}]}},
        "enum": [{"$ref": "#"}],
        "$defs": {"x": {"const": {"$ref": "#"}}},
    }
