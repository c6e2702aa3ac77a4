"""Start, inspect and stop an emulated fleet; the interface of this package.

All files of a fleet are in its directory, except its fleet.yaml, its control groups and a directory with a
short path for the TMPDIRs.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import csdctl
from csdctl.documents import make_directory, save_bytes, save_text
from csdctl.emulation.cleanup import StoppedFleet, find_owner, keep_fleet, remove_fleet, stop_fleet
from csdctl.emulation.limits import open_cpu_limit
from csdctl.emulation.processes import (
    FLEET_VARIABLE,
    anonymous_bytes,
    is_running,
    list_descendants,
)
from csdctl.emulation.state import (
    EmulatedSpec,
    FleetPaths,
    FleetState,
    NodeState,
    check_may_write,
    check_spec,
    load_state,
    locked,
    save_fleet_file,
    save_state,
)
from csdctl.errors import CsdctlError, DeadlineError, InputError

__all__ = ["EmulatedSpec", "NodeStatus", "StoppedFleet", "fleet_status", "is_up", "start_fleet", "stop_fleet"]


@dataclass(frozen=True)
class NodeStatus:
    """The current state of one node; `cpu_limit` in cores."""

    name: str
    port: int
    pid: int
    is_running: bool
    num_processes: int
    cpu_limit: float
    memory_limit_bytes: int
    memory_bytes: int
    cpu_mechanism: str


def start_fleet(
    directory: Path,
    spec: EmulatedSpec,
    *,
    fleet_path: Path | None = None,
    cpu_mechanism: str = "auto",
    owner_pid: int | None = None,
) -> Path:
    """Start the servers, detached, and return the path of the fleet.yaml that describes them.

    The fleet is taken down when process `owner_pid` ends; without one, it stays up. A running fleet with the
    same spec is left as it is, with its owner; one that was stopped with `keep` starts with its files; a
    crashed fleet is removed first. Raises InputError when another fleet is running or kept there, when
    fleet.yaml was not written by the emulator, or when no process has the id `owner_pid`.
    """
    check_spec(spec)
    owner = None if owner_pid is None else find_owner(owner_pid)
    paths = FleetPaths(directory)
    with locked(paths):
        if paths.is_foreign:
            raise InputError(
                f"{paths.directory} contains other files; an emulated fleet needs a separate directory"
            )
        state = load_state(paths)
        if state is not None and _is_alive(state):
            _check_same(paths, state, spec, fleet_path, cpu_mechanism)
            if not state.fleet_path.exists():
                save_fleet_file(paths, state, sys.executable)
            return state.fleet_path
        chosen = (fleet_path or paths.default_fleet).absolute()
        check_may_write(chosen, paths.fleet_id)
        is_kept = state is not None and state.is_kept
        if state is not None and is_kept:
            _check_same(paths, state, spec, fleet_path, cpu_mechanism)
        else:
            remove_fleet(paths)
        if cpu_mechanism == "cgroup":
            open_cpu_limit(cpu_mechanism, paths.fleet_id, "trial", spec.cpu).close()
        state = FleetState(paths.fleet_id, spec, cpu_mechanism, chosen, owner=owner)
        try:
            return _start(paths, state)
        except BaseException:
            if is_kept:
                keep_fleet(paths, state)
            else:
                remove_fleet(paths)
            raise


def is_up(directory: Path) -> bool:
    """Return whether an emulated fleet is running there with every server alive."""
    state = load_state(FleetPaths(directory))
    return state is not None and _is_alive(state)


def fleet_status(directory: Path) -> list[NodeStatus]:
    """Return the current state of every node; none without an emulated fleet."""
    state = load_state(FleetPaths(directory))
    if state is None:
        return []
    return [_status(state, node) for node in state.nodes]


def _check_same(
    paths: FleetPaths, state: FleetState, spec: EmulatedSpec, fleet_path: Path | None, cpu_mechanism: str
) -> None:
    same_path = fleet_path is None or fleet_path.absolute() == state.fleet_path
    what = "kept" if state.is_kept else "running"
    again = f"csdctl emulate up --nodes {state.spec.num_nodes} --cpu {state.spec.cpu:g}"
    if state.spec != spec or state.cpu_mechanism != cpu_mechanism or not same_path:
        raise InputError(
            f"another emulated fleet is {what} in {paths.directory}: {state.spec.num_nodes} nodes with "
            f"{state.spec.cpu:g} cores and {state.spec.memory_bytes >> 20} MiB each, in {state.fleet_path}",
            remedy=f"start it again: `{again}`, or remove it: `csdctl emulate down`"
            if state.is_kept
            else "stop it first: `csdctl emulate down`",
        )


def _start(paths: FleetPaths, state: FleetState) -> Path:
    paths.directory.mkdir(mode=0o700, exist_ok=True)
    save_text(paths.marker, state.fleet_id + "\n")
    _create_nodes(paths, state)
    save_state(paths, state)
    nodes = _launch(paths, timeout_s=30 + 2 * state.spec.num_nodes)
    for name in {*state.node_names} - {node.name for node in nodes}:
        log = paths.node(name).log
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        raise CsdctlError(f"its server did not start: {lines[-1] if lines else 'no message'}", node=name)
    state = replace(state, nodes=nodes)
    keys = {node.port: paths.node(node.name).public_host_key.read_text() for node in nodes}
    save_text(paths.known_hosts, "".join(f"[127.0.0.1]:{port} {key.strip()}\n" for port, key in keys.items()))
    save_fleet_file(paths, state, sys.executable)
    save_state(paths, state)
    return state.fleet_path


def _create_nodes(paths: FleetPaths, state: FleetState) -> None:
    import asyncssh  # heavy

    def create_key(path: Path) -> None:
        if path.exists():  # of a fleet that was kept
            return
        key = asyncssh.generate_private_key("ssh-ed25519")
        save_bytes(path, key.export_private_key())
        save_bytes(path.with_name(f"{path.name}.pub"), key.export_public_key())

    create_key(paths.key)
    # Open MPI creates Unix sockets at paths 60 characters longer than TMPDIR; the limit is 108.
    short = Path(tempfile.mkdtemp(prefix=paths.short_tmp_prefix))
    paths.short_tmp.symlink_to(short)
    for name in state.node_names:
        node = paths.node(name)
        make_directory(node.private)
        create_key(node.host_key)
        (short / name).mkdir(mode=0o700)
        node.tmp.symlink_to(short / name)


def _launch(paths: FleetPaths, timeout_s: float) -> tuple[NodeState, ...]:
    """Start the servers and what watches the owner; return the servers that listen."""
    command = [sys.executable, "-P", "-m", "csdctl.emulation.server", str(paths.directory)]
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        # The servers find this csdctl even if it is not installed.
        "PYTHONPATH": str(Path(csdctl.__file__).parents[1]),
        FLEET_VARIABLE: paths.fleet_id,
        "TMPDIR": tempfile.gettempdir(),  # where a server has to look for the short directory
    }
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"the emulated fleet did not start within {timeout_s:g} s") from None
    if ended.returncode != 0:
        raise CsdctlError(
            f"the emulated fleet did not start: {ended.stderr.decode(errors='replace').strip()}"
        )
    nodes = [NodeState(**json.loads(line)) for line in ended.stdout.splitlines()]
    return tuple(sorted(nodes, key=lambda node: int(node.name.removeprefix("csd"))))


def _is_alive(state: FleetState) -> bool:
    return bool(state.nodes) and all(is_running(node.pid, node.start_time) for node in state.nodes)


def _status(state: FleetState, node: NodeState) -> NodeStatus:
    running = is_running(node.pid, node.start_time)
    pids = list_descendants(node.pid) if running else []
    return NodeStatus(
        node.name,
        node.port,
        node.pid,
        running,
        len(pids),
        state.spec.cpu,
        state.spec.memory_bytes,
        sum(map(anonymous_bytes, pids)),
        node.cpu_mechanism,
    )
