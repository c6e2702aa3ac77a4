"""Programs that run on a machine before anything was sent to it: one file of the worker, as text.

They need a Python and nothing else. `-I -S` keeps the user's own modules out and starts in half the time.
"""

from collections.abc import Sequence
from importlib import resources


def build_program_command(python: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The argument list that runs csdctl/standalone/MODULE.py by itself."""
    return [python, "-I", "-S", "-c", read_program(module), *arguments]


def read_program(module: str) -> str:
    """The text of csdctl/standalone/MODULE.py."""
    return (resources.files("csdctl") / "standalone" / f"{module}.py").read_text(encoding="utf-8")
