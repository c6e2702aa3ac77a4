"""The receiver as a program: its Python, its imports and its length. It runs under dropbear in tests/lab."""

import ast
import sys
from pathlib import Path

from csdctl.shipping.deliver import build_receiver
from csdctl.transport.commands import build_wrapped_command

SOURCE = Path(__file__).parents[3] / "csdctl" / "standalone" / "receive.py"
DROPBEAR_MAX_COMMAND_BYTES = 9000


def test_receiver_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_command_line_is_short_enough_for_dropbear() -> None:
    command, _ = build_receiver("/opt/csdctl/bin/python", {"objects": ["x" * 64] * 10_000})
    line = build_wrapped_command(command, deadline_s=None).command_line
    assert len(line) < DROPBEAR_MAX_COMMAND_BYTES
