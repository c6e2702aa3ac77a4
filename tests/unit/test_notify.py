"""Text of others, made printable."""

import sys

import pytest

from csdctl.notify import make_printable, shorten


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain — “text”, 3 × 4 ≥ 5 → ok\n\tand more", "plain — “text”, 3 × 4 ≥ 5 → ok\n\tand more"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x1b]52;c;QQ==\x07", r"\x1b]52;c;QQ==\x07"),
        ("a\rb\bc\0", r"a\rb\x08c\x00"),
        ("\x7f\x85\x9b2J", r"\x7f\x85\x9b2J"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("a\u200bb\ufeffc\u00add", r"a\u200bb\ufeffc\xadd"),
        ("a\u2028b\u2029c\vd\fe\x1cf", r"a\u2028b\u2029c\x0bd\x0ce\x1cf"),
        ("\ud800\udc9b", r"\ud800\udc9b"),
        ("\U000e0041\ue000", r"\U000e0041\ue000"),
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


def test_long_text_is_shortened_with_its_length() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 1_000_000, 5) == "aaaaa… (1,000,000 characters)"
