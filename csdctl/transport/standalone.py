"""Programs of csdctl/standalone as source text: they run on a machine before anything is installed there.

They need only Python. `-I -S` keeps the user's modules out and halves the start-up time.
"""

import sys
from collections.abc import Sequence
from importlib import resources


def build_program_command(python: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the argument list that runs csdctl/standalone/MODULE.py on its own."""
    return [python, "-I", "-S", "-c", read_program(module), *arguments]


def build_child_command(command: Sequence[str], parent: int) -> list[str]:
    """Return the argument list that runs a program of this host that ends with process `parent`.

    The thread that starts it must wait for it: for the kernel, that thread is the parent.
    """
    return build_program_command(sys.executable, "child", [str(parent), *command])


def read_program(module: str) -> str:
    """Return the source of csdctl/standalone/MODULE.py."""
    return (resources.files("csdctl") / "standalone" / f"{module}.py").read_text(encoding="utf-8")
