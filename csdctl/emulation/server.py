"""One node: an SSH server on 127.0.0.1 with its own home, TMPDIR and limits.

Run as `python -m csdctl.emulation.server DIRECTORY`: reads the fleet's state.json, forks one server for
each node (so that imported modules are in memory once), and exits. A server prints its NodeState once it
listens, and ends on SIGTERM. It adopts daemons (child subreaper), so every process started over SSH is its
descendant and subject to its limits.

It also forks the process that watches the fleet's owner.
"""

import asyncio
import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import asyncssh

from csdctl.emulation.cleanup import watch_owner
from csdctl.emulation.commands import Commands
from csdctl.emulation.limits import open_cpu_limit, watch_memory
from csdctl.emulation.processes import (
    FLEET_VARIABLE,
    NODE_VARIABLE,
    list_children,
    list_descendants,
    send_signal,
    start_time,
)
from csdctl.emulation.state import USER, FleetPaths, FleetState, NodePaths, NodeState, load_state
from csdctl.errors import CsdctlError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REAP_INTERVAL_S = 0.25

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15

LIBC = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)


def build_environment(state: FleetState, name: str, paths: NodePaths) -> dict[str, str]:
    """Return the complete environment of a node's processes, without the user's own variables."""
    return {
        "HOME": str(paths.home),
        "TMPDIR": str(paths.tmp.resolve()),  # its short path
        "PATH": PATH,
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        FLEET_VARIABLE: state.fleet_id,
        NODE_VARIABLE: name,
        "CSDCTL_CPU_LIMIT": f"{state.spec.cpu:g}",
        "CSDCTL_MEMORY_LIMIT": str(state.spec.memory_bytes),
    }


async def serve_node(paths: FleetPaths, state: FleetState, name: str, report: int) -> None:
    """Serve one node on a free port until SIGTERM; write its NodeState to `report` once it listens."""
    node = paths.node(name)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    limit = open_cpu_limit(state.cpu_mechanism, state.fleet_id, name, state.spec.cpu)
    try:
        commands = Commands(limit, build_environment(state, name, node), node.home)
        acceptor = await asyncssh.listen(
            "127.0.0.1",
            0,
            authorized_client_keys=f"{paths.key}.pub",
            server_host_keys=[str(node.host_key)],
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
            asyncio.create_task(watch_memory(state.spec.memory_bytes)),
            asyncio.create_task(_reap_adopted(commands)),
        ]
        started = start_time(os.getpid()) or 0
        ready = NodeState(name, os.getpid(), started, acceptor.get_port(), limit.mechanism)
        os.write(report, json.dumps(vars(ready)).encode() + b"\n")
        os.close(report)
        log.info("%s listens on port %d, CPU limit by %s", name, ready.port, limit.mechanism)
        await stopping.wait()
        acceptor.close()
        for task in watching:
            task.cancel()
    finally:
        _end_descendants()
        limit.close()


async def _reap_adopted(commands: Commands) -> None:
    """Reap daemons that have ended: they are children of this process."""
    while True:
        await asyncio.sleep(REAP_INTERVAL_S)
        for pid in list_children(os.getpid()):
            if pid not in commands.pids and not commands.num_starting:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _end_descendants() -> None:
    while pids := list_descendants(os.getpid()):
        send_signal(pids, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


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
    os.chdir(paths.node(name).home)  # relative SFTP paths start here
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
    for name in state.node_names:
        _fork(paths.node(name).log, name, functools.partial(_become_node, paths, state, name, report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
