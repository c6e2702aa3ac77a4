"""Answers of machines: every value has a type and a bound."""

import json
from typing import Any

import pytest

from csdctl.errors import RemoteCommandError
from csdctl.transport.answer import MAX_TEXT_LENGTH, Answer


def answer(**content: Any) -> Answer:
    return Answer.parse(json.dumps(content), "csd3", "probing")


def problem(call: Any) -> str:
    with pytest.raises(RemoteCommandError) as raised:
        call()
    assert raised.value.node == "csd3"
    return raised.value.message


@pytest.mark.parametrize("text", ["", "5", "[1]", "null", "{", "[" * 99_999, '{"a":' * 99_999, "9" * 9999])
def test_what_is_no_object_is_refused(text: str) -> None:
    assert problem(lambda: Answer.parse(text, "csd3", "probing")).startswith("probing: received ")


def test_values_are_returned_by_type() -> None:
    found = answer(a="x", b=3, c=True, d=["x"], e=[1, 2], f={"g": 1}, h=[{"i": "j"}], k=None)
    assert (found.text("a"), found.number("b"), found.flag("c")) == ("x", 3, True)
    assert (found.texts("d", 1), found.numbers("e", 2), found.counts("f", 1)) == (["x"], [1, 2], {"g": 1})
    assert found.part("f").number("g") == 1
    assert found.objects("h", 1)[0].text("i") == "j"
    assert found.part_or_none("k") is None
    assert found.text("missing", "default") == "default"
    assert "a" in found
    assert "missing" not in found


def test_text_is_cut() -> None:
    assert len(answer(a="x" * 5000).text("a")) == MAX_TEXT_LENGTH
    assert answer(a=["x" * 5000]).texts("a", 1) == ["x" * MAX_TEXT_LENGTH]


def test_other_types_and_ranges_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    found = answer(a=deep, b=True, c=1.5, d=-1, e=["x", 1], f={"g": "h"}, h=5, i=10**400)
    assert problem(lambda: found.text("a")) == "probing: received list as `a`, expected a text"
    assert problem(lambda: found.text("nothing")) == "probing: received nothing as `nothing`, expected a text"
    assert problem(lambda: found.number("b")) == "probing: received True as `b`, expected an integer"
    assert problem(lambda: found.number("c")) == "probing: received 1.5 as `c`, expected an integer"
    assert problem(lambda: found.number("d")).startswith("probing: received -1 as `d`, expected 0 to ")
    assert len(problem(lambda: found.number("i"))) < 300
    assert problem(lambda: found.flag("h")) == "probing: received 5 as `h`, expected true or false"
    assert problem(lambda: found.items("e", 1)) == "probing: received 2 e, expected at most 1"
    assert problem(lambda: found.texts("e", 9)) == "probing: received 1 in `e`, expected texts"
    assert problem(lambda: found.counts("f", 9)) == "probing: received 'h' as `g`, expected an integer"
    assert problem(lambda: found.counts("f", 0)) == "probing: received 1 f, expected at most 0"
    assert problem(lambda: found.part_or_none("h")) == "probing: received 5 as `h`, expected an object"
    assert problem(lambda: found.objects("e", 9)) == "probing: received 'x' in `e`, expected objects"
