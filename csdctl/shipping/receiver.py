"""The command that receives files on a machine; its source travels on the command line."""

import ast
import base64
import zlib
from functools import cache
from importlib import resources

# A node gets its first files before its own Python is there; then any other will do.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'


def build_receiver_command(python: str, request: str) -> list[str]:
    """The argument list that serves `request` (JSON) on a machine."""
    return ["sh", "-c", _START, "csdctl-receive", python, "-I", "-S", "-c", receiver_source(), request]


@cache
def receiver_source() -> str:
    """`worker/receive.py` as one line of Python, without its docstrings and comments; 6 kB."""
    source = (resources.files("csdctl") / "worker" / "receive.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            lines[node.lineno - 1] = " " * node.col_offset + "pass" if node.col_offset else ""
    code = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    packed = base64.b85encode(zlib.compress(code.encode(), 9)).decode()
    return f'import base64,zlib;exec(zlib.decompress(base64.b85decode("{packed}")))'
