"""Text of others, made printable."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.notify import MAX_MARKS, make_printable, shorten

ANY_TEXT = st.text(st.characters(), max_size=60)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain — “text”, 3 × 4 ≥ 5 → ok\n\tand more", "plain — “text”, 3 × 4 ≥ 5 → ok\n\tand more"),
        ("C:\\temp\\x1b", "C:\\temp\\x1b"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x1b]52;c;QQ==\x07", r"\x1b]52;c;QQ==\x07"),
        ("a\rb\bc\0", r"a\rb\x08c\x00"),
        ("\x7f\x85\x9b2J", r"\x7f\x85\x9b2J"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("a\u200bb\ufeffc\u00add", r"a\u200bb\ufeffc\xadd"),
        ("a\u2028b\u2029c\vd\fe\x1cf", r"a\u2028b\u2029c\x0bd\x0ce\x1cf"),
        ("\ud800\udc9b", r"\ud800\udc9b"),
        ("\U000e0041\ue000", r"\U000e0041\ue000"),
        ("\u3164\u2800\u115f\ufe0f", r"\u3164\u2800\u115f\ufe0f"),
        ("ひらがな 中文 עברית हिन्दी Việt", "ひらがな 中文 עברית हिन्दी Việt"),
        ("e\u0301 " + "z" + "\u0301" * 6, "e\u0301 z" + "\u0301" * 4 + r"\u0301\u0301"),
    ],
)
def test_text_is_shown(text: str, shown: str) -> None:
    assert make_printable(text) == shown


def test_every_character_has_a_shape_afterwards() -> None:
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        shown = make_printable(char)
        assert shown.isprintable() or shown in "\n\t"
        assert shown == char or shown.isascii()


@given(ANY_TEXT)
def test_printable_text_stays_as_it_is(text: str) -> None:
    shown = make_printable(text)
    assert make_printable(shown) == shown
    assert shown.replace("\n", "").replace("\t", "").isprintable()


@given(st.text(st.characters(categories=["Mn", "Me", "Lu"]), max_size=200))
def test_marks_in_a_row_are_few(text: str) -> None:
    in_a_row = 0
    for char in make_printable(text):
        in_a_row = in_a_row + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        assert in_a_row <= MAX_MARKS


def test_long_text_is_shortened_with_its_length() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 1_000_000, 5) == "aaaaa… (1,000,000 characters)"
