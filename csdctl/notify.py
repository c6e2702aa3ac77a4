"""The callback with which lower layers report progress to the user, independent of a terminal."""

from collections.abc import Callable

Say = Callable[[str], None]
"""Show one line of text."""
