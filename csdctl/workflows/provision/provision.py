"""`provision`: from a bare node to one that can train. A node that fails never stops the others.

Each node is asked what it has, is sent what it lacks, and then Ansible installs it without internet. Python
goes through `tar`, as nothing that could compare files runs there yet. The wheels go by content, as a tree
(shipping): an interrupted transfer continues, and the host reads each file once for all nodes.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import csdctl
from csdctl.documents import parse_json_document
from csdctl.errors import CsdctlError, InputError, NodeError, UnreachableError
from csdctl.fleet.model import Fleet, keep_nodes
from csdctl.fleet.requirements import explain_extra, find_program
from csdctl.notify import Say, shorten
from csdctl.runs.ledger import record_traffic
from csdctl.shipping.deliver import OnDeliveryProgress, Payload, TreeRequest, deliver, pack_payload, read_tree
from csdctl.transport.many import Outcome, errors_of, run_on_nodes, values_or_raise
from csdctl.transport.session import Session
from csdctl.worker.protocol.durable_files import save_text
from csdctl.workflows.discovery.inventory import render_ansible
from csdctl.workflows.provision import machine as bare
from csdctl.workflows.provision.bundle import (
    WHEELS,
    Bundle,
    ProvisionRequest,
    collect_bundle,
    python_directory,
)

PREFIX = "csdctl "
"""Begins every line of the callback. Ansible's own warnings have no such beginning."""
NUM_SHOWN = 40
"""Lines of Ansible that an error shows."""
END_DEADLINE_S = 15.0
"""For Ansible and its SSH clients to end after SIGTERM. Then they are killed."""
# A directory with its final name was complete. One that has lost its Python is removed, because `mv` would
# move into it. `sync` before the rename, for a node that loses power here.
_HAS_PYTHON = '[ -x "$1/usr/bin/python$2" ]'
_UNPACK = """\
set -eu
umask 022
rm -rf "$1.part"
mkdir -p "$1.part"
tar -xzf - -C "$1.part"
sync
rm -rf "$1"
mv "$1.part" "$1"
"$1/usr/bin/python$2" -I -c 'import ssl, venv'
"""
_RECORD = """\
set -eu
printf '%s\\n' "$1" > .csdctl/provisioned.json.part
mv .csdctl/provisioned.json.part .csdctl/provisioned.json
"""


@dataclass(frozen=True)
class TaskResult:
    """The end of one task on one node."""

    node: str
    task: str
    state: str
    """One of ok, changed, skipped, failed and unreachable."""
    message: str = ""


@dataclass(frozen=True)
class NodeSummary:
    """Number of tasks of a playbook on one node, by result."""

    ok: int
    changed: int
    failed: int
    unreachable: int
    skipped: int


OnTask = Callable[[TaskResult], None]


@dataclass
class PlaybookResult:
    """The summaries of all nodes, and the failed task of each that has one."""

    summaries: dict[str, NodeSummary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def take(self, text: str, on_task: OnTask) -> bool:
        """Take a line of the callback. Return False for a line of another program that begins alike."""
        try:
            content = parse_json_document(text, "a line of Ansible's callback")
            if content["event"] == "summary":
                self.summaries |= {
                    str(name): NodeSummary(**{key: int(counts[key]) for key in NodeSummary.__annotations__})
                    for name, counts in content["nodes"].items()
                }
                return True
            task = TaskResult(*(str(content[key]) for key in ("node", "task", "state", "message")))
        except (InputError, LookupError, TypeError, ValueError, AttributeError):
            return False
        if task.state in ("failed", "unreachable"):
            self.failures[task.node] = f"{task.task}: {task.message}"
        on_task(task)
        return True

    def judge(self, name: str) -> Outcome[NodeSummary]:
        """Return the result of one node."""
        summary = self.summaries.get(name)
        message = shorten(self.failures.get(name, "no task ran there"), 500)
        if summary and summary.unreachable and not summary.failed:
            remedy = "check `ssh` to it, then run it again"
            return Outcome(name, error=UnreachableError(message, node=name, remedy=remedy))
        if summary and not summary.failed:
            return Outcome(name, summary)
        remedy = "fix it and run the same command again"
        if "No space left on device" in message:
            remedy = "free space there (`df -h`), and run the same command again"
        elif "sudo password" in message:
            remedy = "allow its user sudo without a password, or set `user: root` in the fleet file"
        return Outcome(name, error=NodeError(message, node=name, remedy=remedy))


def ansible_directory() -> Path:
    """Return the directory of the collection: in the repository, or installed with csdctl."""
    package = Path(csdctl.__file__).parent
    return next(path for path in (package / "ansible", package.parent / "ansible") if path.is_dir())


def find_ansible() -> str:
    """Return the path of ansible-playbook. Raises InputError if there is none."""
    program = find_program("ansible-playbook")
    if not program:
        remedy = f"{explain_extra('provision')}; or only send what nodes need: csdctl provision --send"
        raise InputError("`ansible-playbook` is not installed", remedy=remedy)
    return program


def build_environment(base: Mapping[str, str], collection: Path, num_nodes: int) -> dict[str, str]:
    """Return the environment of ansible-playbook: none of the user's Ansible settings. Pure."""
    environment = {name: value for name, value in base.items() if not name.startswith("ANSIBLE_")}
    return environment | {
        "ANSIBLE_CONFIG": str(collection / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(collection / "roles"),
        "ANSIBLE_CALLBACK_PLUGINS": str(collection / "plugins" / "callback"),
        "ANSIBLE_STDOUT_CALLBACK": "csdctl_lines",
        "ANSIBLE_FORKS": str(max(1, min(num_nodes, 32))),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
        "PYTHONWARNINGS": "ignore",
    }


def run_playbook(command: Sequence[str], environment: Mapping[str, str], on_task: OnTask) -> PlaybookResult:
    """Run ansible-playbook, ended on Ctrl-C. Raises CsdctlError if it fails before any node."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout
    result = PlaybookResult()
    messages: deque[str] = deque(maxlen=NUM_SHOWN)
    try:
        for line in process.stdout:
            is_of_callback = line.startswith(PREFIX) and result.take(line.removeprefix(PREFIX), on_task)
            if line.strip() and not is_of_callback:
                messages.append(line.rstrip())
        process.wait()
    except BaseException:
        _end(process)
        raise
    if process.returncode and not result.summaries:
        raise CsdctlError("ansible-playbook failed:" + "".join(f"\n  {line}" for line in messages))
    return result


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C does not wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Sent:
    """The files that one node was sent, or would be."""

    python: str
    bundle_id: str
    num_files: int
    num_bytes: int
    is_installed: bool
    """Whether this bundle is installed there already; then nothing was sent."""


@dataclass(frozen=True)
class Provisioned:
    """The result of provisioning one node, or of a dry run."""

    machine: bare.BareMachine | None = None
    sent: Sent | None = None
    summary: NodeSummary | None = None


def provision(
    request: ProvisionRequest,
    fleet: Fleet,
    *,
    directory: Path,
    say: Say,
    on_progress: OnDeliveryProgress = lambda progress: None,
    on_sent: Callable[[Outcome[Sent]], None] = lambda outcome: None,
    on_task: OnTask = lambda result: None,
) -> dict[str, Outcome[Provisioned]]:
    """Prepare every node. One that fails is in the result. Raises InputError, CsdctlError for the host."""
    if fleet.emulated:
        raise InputError(f"{fleet.path} is an emulated fleet", remedy="its nodes use this machine's Python")
    if not request.sends_only:
        find_ansible()
    machines = _look(request, fleet, directory)
    kinds = dict.fromkeys(outcome.value.kind for outcome in machines.values() if outcome.value)
    contents = {kind: read_bundle(collect_bundle(request, kind, say)) for kind in kinds}
    failed = errors_of(machines)

    def send(session: Session) -> Sent:
        machine = machines[session.name].get()
        return send_bundle(request, session, machine, contents[machine.kind], on_progress)

    sent: dict[str, Outcome[Sent]] = {}
    if len(failed) < len(machines):
        on_traffic = record_traffic(directory, "provision")
        usable = keep_nodes(fleet, machines.keys() - failed.keys())
        sent = run_on_nodes(usable, send, directory=directory, on_done=on_sent, on_traffic=on_traffic)
    failed |= errors_of(sent)
    # In a dry run, Ansible can run only where everything was sent before.
    ready = [
        name
        for name, outcome in sent.items()
        if outcome.value and (outcome.value.is_installed or not request.is_dry_run)
    ]
    played: dict[str, Outcome[NodeSummary]] = {}
    if ready and not request.sends_only:
        played = _play(request, keep_nodes(fleet, ready), "nodes.yml", directory, on_task)
    failed |= errors_of(played)
    outcomes: dict[str, Outcome[Provisioned]] = {}
    for name, machine in machines.items():
        if name in failed:
            outcomes[name] = Outcome(name, error=failed[name])
            continue
        summary = played[name].value if name in played else None
        outcomes[name] = Outcome(name, Provisioned(machine.value, sent[name].value, summary))
    return outcomes


def uninstall(
    request: ProvisionRequest, fleet: Fleet, *, directory: Path, on_task: OnTask
) -> dict[str, Outcome[Provisioned]]:
    """Remove everything that `provision` has installed on the nodes of `fleet`."""
    played = _play(request, fleet, "uninstall.yml", directory, on_task)
    return {
        name: Outcome(name, Provisioned(summary=outcome.value) if outcome.value else None, outcome.error)
        for name, outcome in played.items()
    }


def _look(request: ProvisionRequest, fleet: Fleet, directory: Path) -> dict[str, Outcome[bare.BareMachine]]:
    installs, prefix = not request.sends_only, request.prefix

    def look(session: Session) -> bare.BareMachine:
        user = fleet.node(session.name).user
        probe = bare.build_probe(prefix, user if installs and user != "root" else "")
        machine = bare.parse_machine(session.name, session.run(probe, deadline_s=60.0, needs_state=False))
        if installs:
            bare.check_root(machine)
            bare.check_prefix(machine, prefix)
        return machine

    return run_on_nodes(fleet, look, directory=directory)


def _play(
    request: ProvisionRequest, fleet: Fleet, playbook: str, directory: Path, on_task: OnTask
) -> dict[str, Outcome[NodeSummary]]:
    collection = ansible_directory()
    values = {**request.values, "node_prefix": request.prefix, "node_send": False}
    with tempfile.TemporaryDirectory(prefix=f"csdctl-provision-{os.getpid()}-") as temporary:
        inventory = Path(temporary) / "hosts.yml"
        save_text(inventory, render_ansible(fleet, directory))
        command = [
            *(find_ansible(), str(collection / "playbooks" / playbook), "--inventory", str(inventory)),
            *("--extra-vars", json.dumps(values, sort_keys=True)),
            *(["--check"] if request.is_dry_run else []),
        ]
        environment = build_environment(os.environ, collection, len(fleet.nodes)) | {
            "ANSIBLE_LOCAL_TEMP": f"{temporary}/local",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": f"{temporary}/cp",
        }
        result = run_playbook(command, environment, on_task)
    return {node.name: result.judge(node.name) for node in fleet.nodes}


def collect_fleet(request: ProvisionRequest, fleet: Fleet, directory: Path, say: Say) -> list[Bundle]:
    """Collect for every kind of node in `fleet`. Raises one error for the nodes that cannot be asked."""
    outcomes = _look(replace(request, sends_only=True), fleet, directory)
    machines = values_or_raise(outcomes, "inspecting the nodes")
    return [
        collect_bundle(request, kind, say)
        for kind in dict.fromkeys(machine.kind for machine in machines.values())
    ]


@dataclass(frozen=True)
class BundleContent:
    """A bundle that was read once, for all nodes of its kind."""

    bundle: Bundle
    wheels: Payload
    archive: bytes
    """Python itself, for nodes that have none."""


def read_bundle(bundle: Bundle) -> BundleContent:
    """Read what is sent to nodes. Pip compares the wheels with the hashes of requirements.txt there."""
    archive = (bundle.directory / "python.tar.gz").read_bytes() if bundle.python else b""
    wheels = read_tree(TreeRequest(bundle.directory / "wheels", WHEELS))
    return BundleContent(bundle, pack_payload(trees=[wheels]), archive)


def send_bundle(
    request: ProvisionRequest,
    session: Session,
    machine: bare.BareMachine,
    content: BundleContent,
    on_progress: OnDeliveryProgress = lambda progress: None,
) -> Sent:
    """Send `machine` what it lacks. Raises NodeError for a small disk, and what `deliver` raises."""
    bundle, archive, needed_bytes = content.bundle, content.bundle.python, content.bundle.needed_bytes
    directory, dry_run = python_directory(request.prefix, bundle.python_id), request.is_dry_run
    python = f"{directory}/usr/bin/python{bare.SENT_PYTHON}" if archive else machine.python
    if machine.installed == bundle.id:
        return Sent(python, bundle.id, num_files=0, num_bytes=0, is_installed=True)
    arguments = ("csdctl-python", directory, bare.SENT_PYTHON)
    if archive and session.run(["sh", "-c", _HAS_PYTHON, *arguments]).exit_code == 0:
        needed_bytes -= archive.unpacked_bytes
        archive = None
    if archive:
        bare.check_root(machine)
    bare.check_space(machine, needed_bytes, bundle.wheel_bytes, request.prefix)
    num_files, num_bytes = (1, archive.num_bytes) if archive else (0, 0)
    if archive and dry_run:  # without Python, nothing can compare files there
        num_files += len(bundle.wheels)
        return Sent(python, bundle.id, num_files, num_bytes=bundle.num_bytes, is_installed=False)
    if archive:
        unpack = [*([] if machine.is_root else ["sudo", "-n"]), "sh", "-c", _UNPACK, *arguments]
        unpacked = session.run(unpack, stdin=content.archive, deadline_s=1800.0)
        unpacked.check(session.name, doing="unpacking Python", remedy="check its disk: `df -h`, `mount`")
    delivery = deliver(session, content.wheels, python=python, dry_run=dry_run, on_progress=on_progress)
    if not dry_run:  # tell the playbook what was sent, and which Python to install it with
        record = json.dumps({"python": python, "bundle": bundle.id})
        recorded = session.run(["sh", "-c", _RECORD, "csdctl-record", record])
        recorded.check(session.name, doing="recording what was sent", remedy="check its disk: `df -h`")
    num_files += delivery.num_sent
    num_bytes += delivery.bytes_sent
    return Sent(python, bundle.id, num_files, num_bytes=num_bytes, is_installed=False)
