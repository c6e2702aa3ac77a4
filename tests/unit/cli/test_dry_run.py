"""Every command with --dry-run: nothing changes on the node, nor in the project, whatever is to be done."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from csdctl.cli.app import app, run_command
from csdctl.errors import ExitCode
from csdctl.terminal.streams import Streams
from csdctl.transport.local import LocalSession
from csdctl.workflows.provision.bundle import LOCK, SCHEMA, ProvisionRequest, hash_recipe, select_locked
from csdctl.workflows.provision.machine import build_probe, parse_machine
from docs.generate import list_commands
from tests import patience
from tests.unit.transport.conftest import SshServer, running_server

PREFIX = "/nonexistent/csdctl"
RUN = "20260101-000000-000000"
PLANNED = ("--batch-size", "4", "--skip-doctor")
JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
  private: {path: ~/private.npz}
recipe: {epochs: 1, learning_rate: 0.1}
"""
MODEL = "def build():\n    import keras\n    return keras.Sequential([])\n"

CHANGING = [
    ["clean"],
    ["clean", "--unused", "--yes"],
    ["clean", "--computed", "--yes"],
    ["clean", "--older-than", "1h", "--yes"],
    ["clean", "--kill"],
    ["clean", "--everything", "--yes"],
    ["deploy", "--tree", "tree"],
    ["discover", "--inventory", "hosts", "--force"],
    ["discover", "--inventory", "hosts", "--fleet", "new.yaml"],
    ["discover", "--ssh-config", "ssh_config", "--fleet", "new.yaml"],
    ["trust", "--yes", "--fleet", "renamed.yaml"],
    ["trust", "--forget", "--yes"],
    ["provision", "--send", "--prefix", PREFIX],
]
"""Commands that do something here; the tests run them without --dry-run, too."""
LONG = [["train", *PLANNED], ["train", *PLANNED, "--detach"], ["scale", *PLANNED, "--max-steps", "4"]]
"""Commands that would start workers, or download something."""
PLAYBOOK = """\
#!/bin/sh
case "$*" in *--check*) ;; *) echo changed >played ;; esac
"""
"""In place of ansible-playbook: it changes something unless it is only to check."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    """A node with leftovers of an earlier run, and with files that clean removes on request."""
    with running_server(tmp_path / "server") as running:
        state = running.state / ".csdctl"
        state.mkdir(mode=0o700, parents=True)
        for name in ("objects/0123.npy", "objects/89ab.npy.part", "features/a/images.npy", "data/x"):
            write(state / name, name)
        write(running.home / "private.npz", "private")
        yield running


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a node like this machine needs for training: nothing but a file."""
    directory = tmp_path_factory.mktemp("bundles")
    session = LocalSession("csd0", directory)
    kind = parse_machine("csd0", session.run(build_probe(PREFIX))).kind
    locked = select_locked(LOCK.read_text(), kind, with_keras=False)
    content = {
        "schema": SCHEMA,
        "kind": {"architecture": kind.architecture, "python": kind.python, "sends_python": False},
        "recipe": hash_recipe(ProvisionRequest(directory, PREFIX), kind, locked),
        "wheels": [],
    }
    write(directory / kind.name / "wheels/requirements.txt", "")
    write(directory / kind.name / "bundle.json", json.dumps(content))
    return directory


@pytest.fixture
def project(server: SshServer, bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet of one node, a job, a tree, and whatever a fleet file is written from."""
    directory = tmp_path / "project"
    (directory / ".csdctl").mkdir(mode=0o700, parents=True)
    key = str(server.key)
    node = {"name": "csd0", "address": "127.0.0.1", "port": server.port, "user": "tester", "key": key}
    fleet = {"nodes": [{**node, "python": sys.executable}]}
    write(directory / "fleet.yaml", json.dumps(fleet))
    write(directory / "renamed.yaml", json.dumps({"nodes": [{**fleet["nodes"][0], "address": "localhost"}]}))
    hosts = {"_meta": {"hostvars": {"csd7": {"ansible_host": "127.0.0.1"}}}, "csds": {"hosts": ["csd7"]}}
    write(directory / "hosts", json.dumps(hosts))
    write(directory / "ssh_config", "Host csd8\n  HostName 127.0.0.1\n")
    write(directory / "job.yaml", JOB)
    write(directory / "model.py", MODEL)
    write(directory / "tree/file", "content")
    np.savez(directory / "public.npz", x=np.zeros((8, 2), np.float32), y=np.zeros(8, np.int64))
    write(directory / ".csdctl/known_hosts", server.known_hosts.read_text())
    write(directory / ".csdctl/failed.json", "{}")
    write(directory / ".csdctl/features/c/images.npy", "features")
    shutil.copytree(bundles, directory / ".csdctl/provision")
    monkeypatch.chdir(directory)
    return directory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)


@contextmanager
def left_process(home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process as an earlier run would have left it on the node."""
    command = ["sh", "-c", "sleep 100000; true", f"csdctl-run={RUN}/csd0"]
    with subprocess.Popen(command, cwd=home, start_new_session=True) as process:
        try:
            yield process
        finally:
            patience.kill_tree(process.pid)


def files_of(*directories: Path) -> dict[str, tuple[int, object]]:
    """Return mode and content of everything there, but for the ledger: a dry run sends bytes, too."""
    files: dict[str, tuple[int, object]] = {}
    for path in (path for directory in directories for path in directory.rglob("*")):
        if path.stem == "ledger":
            continue
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = (path.stat().st_mtime_ns, path.read_bytes())
        files[str(path)] = (path.lstat().st_mode, content)
    return files


def run(*arguments: str) -> tuple[int, str]:
    stderr = StringIO()
    code = run_command(arguments, Streams(stderr=stderr))
    return code, stderr.getvalue()


@pytest.mark.parametrize("words", [*CHANGING, *LONG], ids=" ".join)
def test_dry_run_changes_nothing_that_the_command_would(
    words: list[str], project: Path, server: SshServer
) -> None:
    with left_process(server.state) as process:
        before = files_of(project, server.home)
        code, stderr = run(*words, "--dry-run")
        assert code == ExitCode.DONE, stderr
        assert files_of(project, server.home) == before
        assert process.poll() is None
        if words in CHANGING:
            run(*words)
            assert files_of(project, server.home) != before


def test_playbook_of_a_dry_run_only_checks(project: Path, tmp_path: Path) -> None:
    """ansible-playbook is the one beside the Python that csdctl runs on."""
    python, playbook = tmp_path / "bin/python", tmp_path / "bin/ansible-playbook"
    write(playbook, PLAYBOOK)
    playbook.chmod(0o700)
    python.symlink_to(sys.executable)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for words, is_changed in (["--dry-run"], False), (["--yes"], True):
        command = [str(python), "-m", "csdctl", "provision", "--uninstall", "--prefix", PREFIX, *words]
        done = patience.run_command(command, cwd=project, env=environment)
        assert "no task ran there" in done.stdout + done.stderr
        assert (project / "played").exists() == is_changed


def test_every_command_with_a_dry_run_is_tested_here() -> None:
    able = {
        name.removeprefix("csdctl ")
        for name, command in list_commands(app)
        if any("--dry-run" in parameter.opts for parameter in command.params)
    }
    assert able == {words[0] for words in [*CHANGING, *LONG]}
