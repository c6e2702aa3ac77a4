"""Programs of csdctl/standalone as source text: they run on a machine before anything is installed there.

They need only Python. `-I -S` keeps the user's modules out and halves the start-up time.
"""

from collections.abc import Sequence
from importlib import resources


def build_program_command(python: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the argument list that runs csdctl/standalone/MODULE.py on its own."""
    return [python, "-I", "-S", "-c", read_program(module), *arguments]


def read_program(module: str) -> str:
    """Return the source of csdctl/standalone/MODULE.py."""
    return (resources.files("csdctl") / "standalone" / f"{module}.py").read_text(encoding="utf-8")
