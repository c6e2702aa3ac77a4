"""One node: an SSH server on 127.0.0.1 with its own home, TMPDIR and limits.

Run as `python -m csdctl.emulation.server DIRECTORY`: forks one server for each node (so that imported modules
are in memory once), and what watches the fleet's owner. A server prints its NodeState once it listens, and
ends on SIGTERM. It adopts daemons (child subreaper), so that its limits hold for all that starts over SSH.

A command runs as sshd starts it, but its process group is ended when the client disconnects before its end.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh

from csdctl.emulation import limits
from csdctl.emulation.fleet import USER, FleetPaths, FleetState, NodeState, load_state, watch_owner
from csdctl.errors import CsdctlError
from csdctl.worker.protocol.processes import LIBC, end_descendants, load_stat, send_signal

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GRACE_S = 1.0
"""From SIGTERM to SIGKILL for a command after its client has disconnected."""
CHUNK_BYTES = 1 << 16

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15

log = logging.getLogger(__name__)


class Commands:
    """Run the commands of one node. `pids` are the processes that are waited for here."""

    def __init__(
        self, limit: limits.CgroupLimit | limits.DutyCycle, environment: dict[str, str], home: Path
    ) -> None:
        self._limit = limit
        self._environment = environment
        self._home = home
        self.pids: set[int] = set()
        self.num_starting = 0
        """Number of processes whose ids are not among `pids` yet."""

    async def run(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        """Serve one exec or shell request to its end."""
        child = await self._start(process.command)
        finished = False
        try:
            finished = await self._forward(process, child)
        finally:
            self.pids.discard(child.pid)
            if not finished:
                send_signal(_members(child.pid), signal.SIGTERM)
                loop = asyncio.get_running_loop()
                loop.call_later(GRACE_S, lambda: send_signal(_members(child.pid), signal.SIGKILL))
        if not finished:
            process.close()
        elif (code := await child.wait()) >= 0:
            process.exit(code)
        else:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))

    async def _start(self, command: str | None) -> Process:
        shell = ["/bin/sh"] if command is None else ["/bin/sh", "-c", command]
        self.num_starting += 1
        try:
            child = await asyncio.create_subprocess_exec(
                *self._limit.build_command(shell),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=CHUNK_BYTES,
                cwd=self._home,
                env=self._environment,
                umask=0o022,  # the usual one of a login, not the stricter one of `csdctl emulate up`
                start_new_session=True,
            )
            self.pids.add(child.pid)
        finally:
            self.num_starting -= 1
        return child

    async def _forward(self, process: "asyncssh.SSHServerProcess[bytes]", child: Process) -> bool:
        """Forward the streams until the command has ended. Return False if the client disconnects first."""
        # Not `process.redirect`: asyncssh 2.24 loses the end of the output when the client is slow.
        stdin = asyncio.create_task(_forward_input(process, child))
        ended: asyncio.Future[Any] = asyncio.gather(
            _forward_output(child.stdout, process.stdout),
            _forward_output(child.stderr, process.stderr),
            child.wait(),
        )
        try:
            while not ended.done() and not process.is_closing():
                lost: asyncio.Future[Any] = asyncio.ensure_future(process.wait_closed())
                # With a timeout, because unread input delays the close notification.
                await asyncio.wait({ended, lost}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                lost.cancel()
            return ended.done() and ended.exception() is None
        finally:
            stdin.cancel()
            ended.cancel()


async def _forward_input(process: "asyncssh.SSHServerProcess[bytes]", child: Process) -> None:
    """Forward client input to the command with backpressure. Send signals to its process group."""
    assert child.stdin
    try:
        while True:
            try:
                content = await process.stdin.read(CHUNK_BYTES)
            except asyncssh.SignalReceived as received:
                number = getattr(signal, f"SIG{received.signal}", None)
                send_signal(_members(child.pid), number) if number else None
                continue
            if not content:
                return
            with contextlib.suppress(OSError):  # the command no longer reads; further input is dropped
                child.stdin.write(content)
                await child.stdin.drain()
    finally:
        child.stdin.close()


async def _forward_output(reader: asyncio.StreamReader | None, writer: "asyncssh.SSHWriter[bytes]") -> None:
    """Forward command output to the client with backpressure, until every writer has closed."""
    assert reader
    while content := await reader.read(CHUNK_BYTES):
        writer.write(content)
        await writer.drain()


def _members(group: int) -> list[int]:
    stats = {pid: load_stat(pid) for pid in limits.list_descendants(os.getpid())}
    return [pid for pid, stat in stats.items() if stat and stat.group == group]


async def serve_node(paths: FleetPaths, state: FleetState, name: str, report: int) -> None:
    """Serve one node on a free port until SIGTERM. Write its NodeState to `report` once it listens."""
    node = paths.node(name)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    cpu = state.spec.cpu[state.spec.node_names.index(name)]
    environment = {  # without the user's variables
        "HOME": str(node / "home"),
        "TMPDIR": str((paths.short_tmp / name).resolve()),
        "PATH": PATH,
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        limits.FLEET_VARIABLE: state.fleet_id,
        limits.NODE_VARIABLE: name,
        "CSDCTL_CPU_LIMIT": f"{cpu:g}",
        "CSDCTL_MEMORY_LIMIT": str(state.spec.memory_bytes),
    }
    cgroup = limits.cgroup_prefix(state.fleet_id) + name
    group = limits.open_cgroup(cgroup, cpu) if state.cpu_mechanism == "auto" else None
    limit = group or limits.DutyCycle(os.getpid(), cpu)
    try:
        commands = Commands(limit, environment, node / "home")
        acceptor = await asyncssh.listen(
            "127.0.0.1",
            0,
            authorized_client_keys=f"{paths.key}.pub",
            server_host_keys=[asyncssh.import_private_key((node / "host_key").read_bytes())],
            process_factory=commands.run,
            sftp_factory=True,
            password_auth=False,
            kbdint_auth=False,
            allow_pty=False,
            agent_forwarding=False,
            line_editor=False,
            encoding=None,
        )
        watching = [
            asyncio.create_task(limits.watch_memory(state.spec.memory_bytes)),
            asyncio.create_task(_reap_adopted(commands)),
        ]
        started = limits.start_time(os.getpid()) or 0
        ready = NodeState(name, os.getpid(), started, acceptor.get_port(), limit.mechanism)
        os.write(report, json.dumps(vars(ready)).encode() + b"\n")
        os.close(report)
        log.info("%s listens on port %d, CPU limit by %s", name, ready.port, limit.mechanism)
        await stopping.wait()
        acceptor.close()
        for task in watching:
            task.cancel()
    finally:
        end_descendants()
        limit.close()


async def _reap_adopted(commands: Commands) -> None:
    while True:
        await asyncio.sleep(0.25)
        for pid in limits.list_children(os.getpid()):
            if pid not in commands.pids and not commands.num_starting:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _fork(log_path: Path, name: str, run: Callable[[], None]) -> None:
    """Run a function in a forked child that is detached from this process."""
    if os.fork():
        return
    code = 1
    try:
        os.setsid()
        with open(log_path, "ab") as file, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        logging.getLogger("asyncssh").setLevel(logging.WARNING)
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        run()
        code = 0
    except CsdctlError as error:
        log.error("%s", error.message)
    except Exception:
        log.exception("%s ends", name)
    finally:
        logging.shutdown()
        os._exit(code)


def _become_node(paths: FleetPaths, state: FleetState, name: str, report: int) -> None:
    os.chdir(paths.node(name) / "home")  # relative SFTP paths start here
    LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asyncio.run(serve_node(paths, state, name, report))


def main(directory: str) -> int:
    """Fork what watches the owner of the fleet in `directory`, and the nodes' servers."""
    paths = FleetPaths(Path(directory))
    state = load_state(paths)
    if state is None:
        print(f"{paths.state} cannot be read", file=sys.stderr)
        return 1
    if state.owner:
        watch = functools.partial(watch_owner, paths, state.owner)
        _fork(paths.directory / "owner.log", "owner", watch)
    report = os.dup(1)  # in the servers, 1 becomes their log
    for name in state.spec.node_names:
        _fork(
            paths.node(name) / "server.log", name, functools.partial(_become_node, paths, state, name, report)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
