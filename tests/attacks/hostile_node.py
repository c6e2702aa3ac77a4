"""A node of an emulated fleet that is compromised: whoever controls it controls its Python.

It follows the protocol, with one exception: code of the attacker's choice runs in its MPI processes, as that
of their link, a member of the job like any other.
"""

import sys
from pathlib import Path

_SANDBOX = """
import dataclasses, sys
worker = next(place for place, word in enumerate(sys.argv) if word.endswith(".pyz"))
sys.argv = sys.argv[worker:]
sys.path.insert(0, sys.argv[0])
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.sandbox import SandboxPolicy
from csdctl.worker.sandbox import program
policy = from_json(SandboxPolicy, program._read_line())
paths = program.python_paths
program.python_paths = lambda: [*paths(), {directory!r}]
shell, option, command = policy.command
command = "PYTHONPATH={directory}/site; export PYTHONPATH; " + command
policy = dataclasses.replace(policy, command=(shell, option, command))
program._read_line = lambda: to_json(policy)
sys.exit(program.run_sandbox())
"""
_PYTHON = """#!/bin/sh
case "$*" in
  *" sandbox "*) shift; exec {python} {directory}/sandbox.py "$@" ;;
  *" link "*|*" mpi-check "*) PYTHONPATH={directory}/site exec {python} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


def make_hostile_python(directory: Path, code: str) -> Path:
    """Return a Python that runs `code` at the start of every MPI process, for `python:` in fleet.yaml."""
    (directory / "site").mkdir(parents=True)
    (directory / "site" / "sitecustomize.py").write_text(code)
    (directory / "sandbox.py").write_text(_SANDBOX.format(directory=str(directory)))
    python = directory / "python"
    python.write_text(_PYTHON.format(python=sys.executable, directory=directory))
    python.chmod(0o755)
    return python
