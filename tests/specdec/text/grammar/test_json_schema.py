# Modules: specdec.text.grammar.patterns, specdec.text.grammar.property_names
# Modules: specdec.text.grammar.schema_numbers
"""Schemas without keywords that restrict nothing."""

import json
import random
import re

import pytest

from specdec.text.grammar.json_schema import enforceable
from specdec.text.grammar.patterns import as_rust
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import StructuredOutput

ANY_NAME = {"propertyNames": {"type": "string"}}
RESTRICTS_NOTHING = [
    ANY_NAME,
    {"propertyNames": {}},
    {"propertyNames": True},
    {"uniqueItems": False},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"dependentRequired": {}},
    {"dependentSchemas": {}},
    {"dependencies": {}},
    {"format": "int64"},
    {"format": "uri-reference"},
    {"$schema": "https://json-schema.org/draft-07/schema#"},
    {"$schema": "https://example.com/dialect"},
]
RESTRICTS = [
    {"propertyNames": {"pattern": "a"}},
    {"propertyNames": False},
    {"uniqueItems": True},
    {"unevaluatedProperties": False},
    {"contains": {}},
    {"not": {}},
    {"dependentRequired": {"a": ["b"]}},
    {"format": "date"},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    {"pattern": "^(?!a)"},
]
PLACES = [
    lambda each: each,
    lambda each: {"properties": {"format": each, "uniqueItems": {"type": "string"}}},
    lambda each: {"items": each, "additionalProperties": each, "type": "object"},
    lambda each: {"items": [each], "anyOf": [each, {"type": "null"}], "$defs": {"a": each}},
    lambda each: {"prefixItems": [each], "patternProperties": {"^a": {"oneOf": [each]}}},
]
DATA = {"const": ANY_NAME, "enum": [ANY_NAME, {"format": "x"}], "default": {"uniqueItems": False}}


@pytest.fixture
def accepts(compiler, tokenizer):
    """Return a function that returns whether a text is complete under a schema."""

    def is_complete(schema, text):
        matcher = compiler.compile(StructuredOutput(json_schema=json.dumps(schema))).matcher()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if matcher.num_valid(token_ids) < len(token_ids):
            return False
        for each in token_ids:
            matcher.advance(each)
        return matcher.is_finished or bool(matcher.num_valid([tokenizer.end_token_id]))

    return is_complete


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", RESTRICTS_NOTHING, ids=json.dumps)
def test_what_restricts_nothing_is_left_out_at_every_depth(place, keyword):
    other = {"type": "array", "title": "t"}
    assert enforceable(place({**other, **keyword})) == place(other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", RESTRICTS, ids=json.dumps)
def test_what_restricts_something_stays(place, keyword):
    assert enforceable(place(keyword)) == place(keyword)


@pytest.mark.parametrize("schema", [DATA, True, 3, "a", None, [], {"properties": 3, "items": 4}])
def test_data_and_what_is_no_schema_stay(schema):
    assert enforceable(schema) == schema


MAX = 2**63 - 1
INTEGER = {"type": "integer"}
REWRITTEN = [
    ({"minimum": -(2**63), "maximum": MAX}, "9223372036854774000", "9223372036854775808"),
    ({"exclusiveMinimum": -1.7e308, "maximum": 10**30}, "-5", "null"),
    ({"minimum": MAX, "maximum": MAX}, "9223372036854776000", "5"),
    ({**INTEGER, "minimum": 0, "maximum": MAX}, str(MAX), str(MAX + 1)),
    ({**INTEGER, "minimum": MAX, "maximum": MAX}, str(MAX), str(MAX - 1)),
    ({**INTEGER, "minimum": -(2**63), "maximum": MAX}, str(MAX), "-9223372036854775809"),
    ({"type": ["null", "integer"], "minimum": -1e30, "maximum": 2**64 - 1}, str(MAX), "0.5"),
    ({**INTEGER, "maximum": 2**53 + 3}, str(2**53 + 2), str(2**53 + 4)),
    ({**INTEGER, "maximum": 2**128 - 1}, str(MAX), "0.5"),
    ({"default": 10**30, "examples": [10**30]}, "1", "null"),
    ({"minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
    ({"minLength": 1, "maxLength": MAX}, '"a"', '""'),
    ({"minItems": 1.0}, "[1]", "[]"),
    ({"$ref": "#/$defs/a<b> [é]", "$defs": {"a<b> [é]": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/a%b", "$defs": {"a%b": {"const": 1}}}, "1", "2"),
]


@pytest.mark.parametrize(("keywords", "valid", "invalid"), REWRITTEN)
def test_what_llguidance_does_not_read_is_enforced(compiler, tokenizer, keywords, valid, invalid):
    kind = {"minLength": "string", "minItems": "array"}
    types = [name for key, name in kind.items() if key in keywords] or ["number"]
    schema = json.dumps({"type": types[0], **keywords})
    grammar = compiler.compile(StructuredOutput(json_schema=schema))
    for text, is_valid in ((valid, True), (invalid, False)):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        num_valid = grammar.matcher().num_valid(token_ids)
        assert (num_valid == len(token_ids)) is is_valid, text


@pytest.mark.parametrize("value", [2**53, 10**18, 123456789012345680, -(10**30), 2.5])
def test_constants_have_their_own_digits(matcher, tokenizer, value):
    forced = matcher(json_schema=json.dumps({"const": [value]})).forced_tokens(100)
    assert tokenizer.decode(forced).startswith(f"[{value}]")


def test_a_lower_bound_beyond_doubles_admits_no_number_below_it(accepts):
    schema = {**INTEGER, "minimum": 2**53 + 1}
    assert not accepts(schema, str(2**53))
    assert accepts(schema, str(2**53 + 2))


@pytest.mark.parametrize("value", [MAX, -(2**53) - 1, 123456789012345678, 10**30 + 1, 10**400])
@pytest.mark.parametrize(
    "keyword", [lambda each: {"const": [{"a": each}]}, lambda each: {"enum": ["x", each]}]
)
def test_an_integer_that_no_double_equals_is_no_constant(compiler, keyword, value):
    schema = {"properties": {"id": {"type": "integer", **keyword(value)}}}
    with pytest.raises(InvalidValueError, match="write such ones as strings"):
        compiler.compile(StructuredOutput(json_schema=json.dumps(schema)))
    assert enforceable(schema, is_lenient=True) == {"properties": {"id": {"type": "integer"}}}


def test_equal_bounds_that_no_double_equals_allow_no_other_number(compiler):
    schema = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}
    with pytest.raises(InvalidValueError, match="can be enforced"):
        compiler.compile(StructuredOutput(json_schema=json.dumps(schema)))


PATTERNS = [
    ("^[^[]$", '"a"', '"["'),
    ("^[a[]{2}$", '"[a"', '"b"'),
    ("^[a&&b]{2}$", '"&b"', '"c"'),
    ("^[a~~b]$", '"~"', '"c"'),
    ("^[[:digit:]]$", '"1"', '":"'),
    (r"^\[&&$", '"[&&"', '"["'),
    (r"^[\b]\0$", r'"\b\u0000"', '"b"'),
    (r"^\uD83D\uDE00$", '"😀"', '"a"'),
    (r"^[\ud83d\ude00x]$", '"😀"', '"y"'),
]


@pytest.mark.parametrize(("pattern", "valid", "invalid"), PATTERNS)
def test_a_pattern_has_the_syntax_of_ecma_262(accepts, pattern, valid, invalid):
    schema = {"type": "string", "pattern": pattern}
    assert accepts(schema, valid)
    assert not accepts(schema, invalid)
    by_name = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    assert accepts(by_name, f"{{{valid}:1}}")
    assert not accepts(by_name, f"{{{invalid}:1}}")


OBJECT = {"type": "object", "additionalProperties": INTEGER}
UUID = "01234567-89ab-cdef-0123-456789abcdef"
LISTED = {**OBJECT, "propertyNames": {"type": "string", "enum": ["b", "a"]}}
NAMES = [
    (LISTED, ["{}", '{"a":1}', '{"b":1,"a":2}'], ['{"c":1}', '{"a":true}', '{"a":1,"a":2}']),
    ({**LISTED, "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
    ({**LISTED, "properties": {"a": {}, "c": {}}}, ['{"a":true,"b":1}'], ['{"c":1}']),
    ({**LISTED, "additionalProperties": False}, ["{}"], ['{"a":1}']),
    ({"type": "object", "propertyNames": {"const": "a"}}, ['{"a":[]}'], ['{"b":1}']),
    ({**OBJECT, "propertyNames": {"pattern": "^[ab]$"}}, ['{"b":1}'], ['{"c":1}', '{"a":[]}']),
    ({**OBJECT, "propertyNames": {"minLength": 1}}, ['{"é":1}'], ['{"":1}']),
    ({**OBJECT, "propertyNames": {"maxLength": 2}}, ['{"ab":1}', '{"":1}'], ['{"abc":1}']),
    ({**OBJECT, "propertyNames": {"format": "uuid"}}, [f'{{"{UUID}":1}}'], ['{"a":1}']),
    (
        {
            **OBJECT,
            "propertyNames": {"$ref": "#/$defs/A~1B%20C"},
            "$defs": {"A/B C": {"title": "A", "enum": ["a"], "type": "string"}},
        },
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": {"not": {}}},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    ({**OBJECT, "unevaluatedProperties": False}, ['{"b":1}'], ['{"b":true}']),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), NAMES)
def test_names_of_properties_are_enforced(accepts, schema, valid, invalid):
    assert [each for each in valid if not accepts(schema, each)] == []
    assert [each for each in invalid if accepts(schema, each)] == []


LOOKED_AROUND = {
    "email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
        r"[A-Za-z]{2,}$",
        "ab'.-+@1Z",
    ),
    "duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
        r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        "PTWYMDHS1.,",
    ),
}


@pytest.mark.parametrize(("pattern", "characters"), LOOKED_AROUND.values(), ids=LOOKED_AROUND)
def test_patterns_of_zod_have_an_equivalent_without_look_around(compiler, pattern, characters):
    ours, draw, num_valid = as_rust(pattern), random.Random(0), 0
    assert "(?=" not in ours
    assert "(?!" not in ours
    valid = ["a.b'c@d.ef", "+@1.ZZ", "P1W", "P1Y1M1DT1H1M1,1S", "PT1.5S", "P1M", "PT1M1S"]
    for _ in range(20_000):
        text = list(draw.choice(valid))
        for _ in range(draw.randrange(4)):
            text[draw.randrange(len(text)) :][:1] = draw.choice(["", *characters])
            text.insert(draw.randrange(len(text) + 1), draw.choice(["", *characters]))
        written = "".join(text)
        is_valid = re.fullmatch(pattern, written) is not None
        assert (re.fullmatch(ours, written) is not None) is is_valid, written
        num_valid += is_valid
    assert num_valid > 1_000
    assert enforceable({"pattern": pattern}, is_lenient=True) == {"pattern": ours}
    compiler.compile(StructuredOutput(json_schema=json.dumps({"pattern": pattern})))


def test_a_pattern_of_a_time_has_precedence_over_its_format(accepts):
    local = {"type": "string", "format": "time", "pattern": r"^[0-2]\d:[0-5]\d$"}
    assert accepts(local, '"12:30"')
    assert not accepts({"type": "string", "format": "time"}, '"12:30"')
    date = {"type": "string", "format": "date", "pattern": "^2"}
    assert not accepts(date, '"2x"')


OTHER_NAMES = [
    {"$ref": "#/$defs/loop"},
    {"$ref": "other.json"},
    {"$ref": "#/$defs/missing"},
    {"minLength": 1.5},
    {"minLength": 1, "format": "uuid"},
    {"format": "date"},
    {"enum": ["a"], "type": "integer"},
    {"enum": [], "minLength": 1},
]


@pytest.mark.parametrize("names", OTHER_NAMES)
def test_other_names_of_properties_are_refused(compiler, names):
    loop = {"loop": {"$ref": "#/$defs/loop"}}
    schema = {**OBJECT, "propertyNames": names, "$defs": loop}
    with pytest.raises(InvalidValueError, match="can be enforced"):
        compiler.compile(StructuredOutput(json_schema=json.dumps(schema)))


def test_unevaluated_properties_beside_other_schemas_stay():
    schema = {"type": "object", "allOf": [{}], "unevaluatedProperties": False}
    assert enforceable(schema) == schema


NOT_REGULAR = [
    "^(?!a)",
    "(?<=a)b",
    r"\bfoo",
    r"^(a)\1$",
    "(?>a)",
    "(?P=n)",
    "(?#c)",
    r"a\Z",
    r"\cA",
]


@pytest.mark.parametrize("pattern", NOT_REGULAR)
def test_only_a_lenient_schema_loses_a_pattern_without_grammar(pattern):
    schema = {"pattern": pattern, "patternProperties": {pattern: {}, "a": {"pattern": pattern}}}
    schema |= {"additionalProperties": False, "unevaluatedProperties": False}
    assert enforceable(schema) == schema
    assert enforceable(schema, is_lenient=True) == {"patternProperties": {"a": {}}}


@pytest.mark.parametrize(
    "pattern",
    [r"a\\b", "^[a-z]+$", "(?:a|b)", "(?i:a)", r"\(?=", "[(?=]x", r"[^]\](?=]", "(?P<n>a)", 3],
)
def test_a_lenient_schema_keeps_other_patterns(pattern):
    schema = {"items": {"pattern": pattern}, "additionalProperties": False}
    schema["patternProperties"] = {str(pattern): {}}
    assert enforceable(schema, is_lenient=True) == schema


def test_an_anchor_stays():
    schema = {"$ref": "#é", "items": {"$anchor": "é"}}
    assert enforceable(schema) == schema


def test_such_a_schema_is_enforced(matcher):
    schema = {
        "type": "object",
        "properties": {"a": {"const": "x", "format": "path"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    written = matcher(json_schema=json.dumps({**schema, **ANY_NAME, "uniqueItems": False}))
    plain = matcher(json_schema=json.dumps(schema))
    while not plain.is_finished:
        assert (written.allowed_mask() == plain.allowed_mask()).all()
        [token, *_] = plain.forced_tokens(1)
        written.advance(token)
        plain.advance(token)
    assert written.is_finished
