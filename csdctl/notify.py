"""How lower layers tell the person at the terminal something, without knowing of a terminal."""

from collections.abc import Callable

Say = Callable[[str], None]
"""Shows one line of text."""
