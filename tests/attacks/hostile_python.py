"""A program in the place of a node's Python: whatever csdctl asks it to run, it answers as it likes."""

import sys
from pathlib import Path

HEAD = """\
import json, sys, time


def say(kind, **content):
    print("@csdctl-" + kind, json.dumps(content), flush=True)


"""


def write_hostile_python(path: Path, body: str) -> str:
    """Write an executable that runs `body`; return its path, for `python:` of a node."""
    path.write_text(f"#!{sys.executable} -IS\n{HEAD}{body}\n")
    path.chmod(0o755)
    return str(path)
