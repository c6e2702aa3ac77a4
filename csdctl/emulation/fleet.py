"""An emulated fleet: its specification, files and saved state. Start, inspect and stop it.

The id of a fleet is derived from its directory, so that a fleet without its state is still found: by the
marker in the environment of its processes and by the names of its control groups. The first line of its
fleet.yaml has the id and a hash of the other lines. Any other or edited fleet.yaml is left as it is.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

import csdctl
from csdctl.documents import check_values, load_json, save_json
from csdctl.emulation import limits
from csdctl.errors import CsdctlError, DeadlineError, InputError
from csdctl.fleet.facts import facts_path
from csdctl.fleet.model import Fleet
from csdctl.worker.protocol.durable_files import make_directory, save_bytes, save_text
from csdctl.worker.protocol.processes import send_signal

DEFAULT_NUM_NODES = 4
MAX_NODES = 64
MIN_CPU = 0.01
"""Minimum share, in cores: below it a node takes seconds to respond."""
MIN_MEMORY_BYTES = 16 << 20
USER = "csd"
"""The user name for SSH. The nodes' servers accept any."""
_HEADER = "# Written by csdctl emulate up for fleet {}; `csdctl emulate down` removes it unless edited: {}\n"


@dataclass(frozen=True)
class EmulatedSpec:
    """The nodes of an emulated fleet: the cores that each gets, and `memory_bytes` of each."""

    cpu: Annotated[
        tuple[Annotated[float, Field(ge=MIN_CPU, le=os.cpu_count() or 1)], ...],
        Field(min_length=1, max_length=MAX_NODES),
    ]
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES)] = 2 << 30

    @property
    def node_names(self) -> list[str]:
        """csd0, csd1, …"""
        return [f"csd{number}" for number in range(len(self.cpu))]

    @property
    def cpu_option(self) -> str:
        """The cores as a value of `--cpu`: one number for all nodes, or one for each."""
        shares = self.cpu if len({*self.cpu}) > 1 else self.cpu[:1]
        return ",".join(f"{share:g}" for share in shares)


def check_spec(spec: EmulatedSpec) -> None:
    """Raise InputError for a fleet that this machine cannot emulate."""
    remedy = "for example --nodes 4 --cpu 0.25 --memory 2G; a node that trains needs about 1G"
    check_values(asdict(spec), EmulatedSpec, "emulated fleet", remedy=remedy)


def parse_shares(text: str, num_nodes: int | None) -> tuple[float, ...]:
    """Parse `0.25`, for all nodes, or `0.5,0.25,0.1`, for one node each. Return the cores of each node.

    Raises InputError for text that is no number, or for another number of values than `num_nodes`.
    """
    remedy = "for example --cpu 0.25 for all nodes, or --cpu 0.5,0.25,0.1 for three"
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        problem = f"received {text!r} as a share of the CPU, expected numbers of cores, separated by commas"
        raise InputError(problem, remedy=remedy) from None
    if len(shares) == 1:
        return shares * (DEFAULT_NUM_NODES if num_nodes is None else num_nodes)
    if num_nodes not in (None, len(shares)):
        problem = f"received --cpu {text} with {len(shares)} values for --nodes {num_nodes}"
        raise InputError(f"{problem}, expected one value for all nodes, or one for each", remedy=remedy)
    return shares


class FleetPaths:
    """The path of every file of an emulated fleet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.fleet_id = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]
        self.marker = self.directory / "fleet.id"
        """Written first. It marks the directory of an emulated fleet, which may be removed."""
        self.state = self.directory / "state.json"
        self.key = self.directory / "id_ed25519"
        self.default_fleet = self.directory / "fleet.yaml"
        self.short_tmp = self.directory / "tmp"
        """A link to a short path, with the nodes' TMPDIRs."""
        self.short_tmp_prefix = f"csd-{self.fleet_id[:8]}-"
        """The name of that directory begins with this; the rest is random, so that nobody can take it."""
        self.known_hosts = self.directory / "known_hosts"

    @property
    def is_ours(self) -> bool:
        """Whether the directory was created for an emulated fleet."""
        return self.marker.exists() or self.state.exists()

    @property
    def is_foreign(self) -> bool:
        """Whether the directory has files, and was not created for an emulated fleet."""
        return self.directory.exists() and not self.is_ours and any(self.directory.iterdir())

    def node(self, name: str) -> Path:
        """Return the directory of one node, with `home`, `host_key`, `host_key.pub` and `server.log`."""
        return self.directory / "nodes" / name


@dataclass(frozen=True)
class NodeState:
    """One server. `start_time` in clock ticks since boot detects a reused pid."""

    name: str
    pid: int
    start_time: int
    port: int
    cpu_mechanism: str


@dataclass(frozen=True)
class Owner:
    """The process that the fleet ends with. `start_time` in clock ticks since boot."""

    pid: int
    start_time: int


@dataclass(frozen=True)
class FleetState:
    """The state that `up` saves. `nodes` is empty while the fleet starts, and when it is down and kept."""

    fleet_id: str
    spec: EmulatedSpec
    cpu_mechanism: str
    fleet_path: Path
    nodes: tuple[NodeState, ...] = ()
    owner: Owner | None = None
    """The fleet's owner; without one, the fleet stays up until `down`."""
    schema: Literal[2] = 2


def save_state(paths: FleetPaths, state: FleetState) -> None:
    """Write state.json atomically."""
    save_json(paths.state, {**vars(state), "fleet_path": str(state.fleet_path)})


def load_state(paths: FleetPaths) -> FleetState | None:
    """Read state.json, None when it is missing. Raises InputError for one that is damaged or outdated."""
    if not os.path.lexists(paths.state):
        return None
    remedy = "remove the fleet with all files of its nodes: `csdctl emulate down`"
    return check_values(load_json(paths.state, remedy=remedy), FleetState, str(paths.state), remedy=remedy)


@contextlib.contextmanager
def locked(paths: FleetPaths) -> Iterator[None]:
    """Wait for the lock, and hold it."""
    make_directory(paths.directory.parent)
    handle = os.open(paths.directory.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def save_fleet_file(paths: FleetPaths, state: FleetState, python: str) -> None:
    """Write the fleet.yaml of a running emulated fleet."""
    content = {
        "emulated": True,
        "network": "127.0.0.0/8",
        "defaults": {"user": USER, "key": str(paths.key), "python": python, "group": "emulated"},
        "nodes": [{"name": node.name, "address": "127.0.0.1", "port": node.port} for node in state.nodes],
    }
    text = yaml.safe_dump(content, sort_keys=False)
    save_text(state.fleet_path, _build_header(state.fleet_id, text) + text)


def _build_header(fleet_id: str, text: str) -> str:
    return _HEADER.format(fleet_id, hashlib.sha256(text.encode()).hexdigest()[:12])


def is_written_for(path: Path, fleet_id: str) -> bool:
    """Return whether `path` is a fleet.yaml as the emulator wrote it for this fleet."""
    try:
        header, newline, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return False
    return header + newline == _build_header(fleet_id, text)


@dataclass(frozen=True)
class NodeStatus:
    """The current state of one node. `cpu_limit` in cores."""

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

    It ends with process `owner_pid`, if that is given. A running fleet with the same spec is left as it is.
    One that was kept, or has lost a server, starts again with its files. Raises InputError for another fleet,
    a fleet.yaml that the emulator did not write, or no process `owner_pid`.
    """
    check_spec(spec)
    owner = None if owner_pid is None else find_owner(owner_pid)
    paths = FleetPaths(directory)
    fleet_path = fleet_path and fleet_path.absolute()
    with locked(paths):
        if paths.is_foreign:
            problem = "contains other files; an emulated fleet needs a separate directory"
            raise InputError(f"{paths.directory} {problem}")
        state = load_state(paths)
        if state:
            _check_same(paths, state, spec, fleet_path)
        if state and _is_alive(state):
            if not state.fleet_path.exists():
                save_fleet_file(paths, state, sys.executable)
            return state.fleet_path
        new_path = fleet_path or paths.default_fleet
        if new_path.exists() and not is_written_for(new_path, paths.fleet_id):
            problem = "was edited, or not written by `csdctl emulate up` for this fleet; it is unchanged"
            remedy = "move it away and add your settings to the new one, or use another file with --fleet"
            raise InputError(f"{new_path} {problem}", remedy=remedy)
        _stop(paths, state)
        new_state = FleetState(paths.fleet_id, spec, cpu_mechanism, new_path, owner=owner)
        try:
            return _start(paths, new_state)
        except BaseException:
            _stop(paths, state and new_state)
            raise


def is_up(directory: Path) -> bool:
    """Return whether an emulated fleet is running there with every server alive."""
    state = load_state(FleetPaths(directory))
    return state is not None and _is_alive(state)


def fleet_status(directory: Path) -> list[NodeStatus]:
    """Return the current state of every node. Empty without an emulated fleet that runs."""
    state = load_state(FleetPaths(directory))
    if state is None or not state.nodes:
        return []
    statuses = []
    for node, cpu in zip(state.nodes, state.spec.cpu, strict=False):
        running = limits.is_running(node.pid, node.start_time)
        pids = limits.list_descendants(node.pid) if running else []
        statuses.append(
            NodeStatus(
                name=node.name,
                port=node.port,
                pid=node.pid,
                is_running=running,
                num_processes=len(pids),
                cpu_limit=cpu,
                memory_limit_bytes=state.spec.memory_bytes,
                memory_bytes=sum(limits.anonymous_bytes(pid, is_divided=True) for pid in pids),
                cpu_mechanism=node.cpu_mechanism,
            )
        )
    return statuses


def _check_same(paths: FleetPaths, state: FleetState, spec: EmulatedSpec, fleet_path: Path | None) -> None:
    if state.spec == spec and fleet_path in (None, state.fleet_path):
        return
    num_nodes, shares = len(state.spec.cpu), state.spec.cpu_option
    remedy = "stop it first: `csdctl emulate down`"
    if not state.nodes:
        restart = f"csdctl emulate up --nodes {num_nodes} --cpu {shares}"
        remedy = f"start it again: `{restart}`, or remove it: `csdctl emulate down`"
    raise InputError(
        f"another emulated fleet is {'running' if state.nodes else 'kept'} in {paths.directory}: "
        f"{num_nodes} nodes with {shares} cores and {state.spec.memory_bytes >> 20} MiB each, "
        f"in {state.fleet_path}",
        remedy=remedy,
    )


def _start(paths: FleetPaths, state: FleetState) -> Path:
    make_directory(paths.directory)
    save_text(paths.marker, state.fleet_id + "\n")
    _create_nodes(paths, state)
    save_state(paths, state)
    nodes = _launch(paths, timeout_s=30 + 2 * len(state.spec.cpu))
    started = {node.name for node in nodes}
    if missing := [name for name in state.spec.node_names if name not in started]:
        name = missing[0]
        log = paths.node(name) / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        raise CsdctlError(f"its server did not start: {lines[-1] if lines else 'no message'}", node=name)
    state = replace(state, nodes=nodes)
    keys = {node.port: (paths.node(node.name) / "host_key.pub").read_text() for node in nodes}
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
    for name in state.spec.node_names:
        make_directory(paths.node(name) / "home" / "private")
        create_key(paths.node(name) / "host_key")
        (short / name).mkdir(mode=0o700)


def _launch(paths: FleetPaths, timeout_s: float) -> tuple[NodeState, ...]:
    """Start the servers and what watches the owner. Return the servers that listen."""
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        # The servers find this csdctl even if it is not installed.
        "PYTHONPATH": str(Path(csdctl.__file__).parents[1]),
        limits.FLEET_VARIABLE: paths.fleet_id,
        "TMPDIR": tempfile.gettempdir(),  # where a server has to look for the short directory
    }
    try:
        launcher = subprocess.run(
            [sys.executable, "-P", "-m", "csdctl.emulation.server", str(paths.directory)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"the emulated fleet did not start within {timeout_s:g} s") from None
    if launcher.returncode != 0:
        cause = launcher.stderr.decode(errors="replace").strip()
        raise CsdctlError(f"the emulated fleet did not start: {cause}")
    nodes = [NodeState(**json.loads(line)) for line in launcher.stdout.splitlines()]
    return tuple(sorted(nodes, key=lambda node: int(node.name.removeprefix("csd"))))


def _is_alive(state: FleetState) -> bool:
    return bool(state.nodes) and all(limits.is_running(node.pid, node.start_time) for node in state.nodes)


def stop_fleet(directory: Path, *, keep: bool = False) -> int:
    """End the fleet and remove it, even after a crash. `keep`: its files stay for `start_fleet`.

    Return the number of processes that were ended.
    """
    paths = FleetPaths(directory)
    if not paths.directory.parent.exists():  # removed manually; its processes may still run
        return remove_fleet(paths)
    with locked(paths):
        if paths.is_foreign:
            problem = "is not the directory of an emulated fleet; it is left unchanged"
            raise InputError(f"{paths.directory} {problem}")
        return _stop(paths, load_state(paths) if keep else None)


def _stop(paths: FleetPaths, state: FleetState | None) -> int:
    """End every process of the fleet except this one. Keep the files of a fleet with `state` for `up`."""
    if state is None:
        return remove_fleet(paths)
    num_processes = _end_processes(paths)
    _remove_short_tmp(paths)
    paths.short_tmp.unlink(missing_ok=True)
    save_state(paths, replace(state, nodes=(), owner=None))
    return num_processes


def remove_fleet(paths: FleetPaths) -> int:
    """End every process of the fleet except this one, and remove its control groups and files."""
    state = None
    with contextlib.suppress(InputError):  # also a fleet whose state is damaged
        state = load_state(paths)
    num_processes = _end_processes(paths)
    usual_places = [paths.default_fleet, paths.directory.parent.parent / "fleet.yaml"]
    for path in [state.fleet_path] if state else usual_places:
        if is_written_for(path, paths.fleet_id):
            facts_path(Fleet(path=path)).unlink(missing_ok=True)
            path.unlink()
    _remove_short_tmp(paths)
    if paths.is_ours:
        # The marker is removed last, so that an interrupted removal can be repeated.
        for entry in paths.directory.iterdir():
            if entry not in (paths.marker, paths.state):
                _remove_tree(entry)
        paths.state.unlink(missing_ok=True)
        paths.marker.unlink(missing_ok=True)
    if paths.directory.exists():
        paths.directory.rmdir()
    return num_processes


def _end_processes(paths: FleetPaths) -> int:
    """End all processes by SIGTERM, then SIGKILL, and remove their control groups. Return their number."""
    spared = set(limits.list_ancestors(os.getpid()))
    seen: set[int] = set()

    def list_remaining() -> set[int]:
        pids = set(limits.list_marked(paths.fleet_id))
        for cgroup in limits.list_cgroups(limits.cgroup_prefix(paths.fleet_id)):
            pids |= set(limits.list_members(cgroup))
        pids = {pid for pid in pids - spared if limits.start_time(pid) is not None}
        seen.update(pids)
        return pids

    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        deadline, signalled = time.monotonic() + patience_s, set[int]()
        while (pids := list_remaining()) and time.monotonic() < deadline:
            send_signal(pids - signalled, number)
            # A server that was killed may have left them stopped.
            send_signal(pids - signalled, signal.SIGCONT)
            signalled |= pids
            time.sleep(0.02)
    if pids:
        remedy = "check them with `ps`, then run `csdctl emulate down` again"
        raise CsdctlError(f"processes of the emulated fleet do not end: {sorted(pids)}", remedy=remedy)
    for cgroup in limits.list_cgroups(limits.cgroup_prefix(paths.fleet_id)):
        limits.remove_cgroup(cgroup)
    return len(seen)


def _remove_short_tmp(paths: FleetPaths) -> None:
    """Remove the short TMPDIRs: the target of the link, and those with the fleet's name if it is lost."""
    linked = [paths.short_tmp.readlink()] if paths.short_tmp.is_symlink() else []
    named = Path(tempfile.gettempdir()).glob(f"{paths.short_tmp_prefix}*")
    for path in {*linked, *named}:
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def find_owner(pid: int) -> Owner:
    """Return the running process `pid` as an owner. Raises InputError if there is none."""
    started = limits.start_time(pid) if pid > 0 else None
    if started is None:
        received = f"received {pid} as the process that the emulated fleet ends with"
        remedy = "pass one, such as --pid $$ for the shell, or leave it out: the fleet then stays up"
        raise InputError(f"{received}, expected the id of a running process", remedy=remedy)
    return Owner(pid, started)


def watch_owner(paths: FleetPaths, owner: Owner) -> None:
    """Stop the fleet when `owner` ends."""
    while limits.is_running(owner.pid, owner.start_time):
        time.sleep(0.2)
    stop_fleet(paths.directory)
