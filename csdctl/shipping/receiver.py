"""The command that receives files on a machine; its source is part of the command line."""

import ast
import base64
import json
import threading
import zlib
from functools import cache

from csdctl.transport.answer import Answer
from csdctl.transport.session import Session
from csdctl.transport.standalone import read_program

PRUNE_DEADLINE_S = 900.0
_DOING = "removing unused files"

# A node gets its first files before its own Python is installed; until then python3 is used.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'


def build_receiver_command(python: str, request: str) -> list[str]:
    """Return the argument list that serves `request` (JSON) on a machine."""
    return ["sh", "-c", _START, "csdctl-receive", python, "-I", "-S", "-c", receiver_source(), request]


def prune_store(session: Session, python: str) -> int:
    """Remove unused objects and trees from the machine's store; return the number of removed names.

    Raises RemoteCommandError on failure.
    """
    command = build_receiver_command(python, json.dumps({"prune": True}))
    done = session.run(command, deadline_s=PRUNE_DEADLINE_S)
    done.check(session.name, doing=_DOING)
    answer = Answer.parse((done.output.splitlines() or [""])[-1], session.name, _DOING)
    return answer.part("done").number("num_removed")


_PARSING = threading.Lock()
"""Python 3.11 may fail with SystemError when several threads parse at a time."""


def receiver_source() -> str:
    """Return `standalone/receive.py` as one line of Python, without docstrings and comments; 7 kB."""
    with _PARSING:
        return _pack_source()


@cache
def _pack_source() -> str:
    source = read_program("receive")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            lines[node.lineno - 1] = " " * node.col_offset + "pass" if node.col_offset else ""
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    code = "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in kept)
    packed = base64.b85encode(zlib.compress(code.encode(), 9)).decode()
    return f'import base64,zlib;exec(zlib.decompress(base64.b85decode("{packed}")))'
