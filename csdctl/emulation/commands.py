"""Commands over SSH: started as sshd does, ended when their channel is lost.

A command runs with `/bin/sh -c` in the node's home, in its own session. When the client disconnects before
the command has ended, its process group is ended too (sshd would leave it). A command that has ended may
leave processes behind, as with sshd; a daemon has left the group and survives in any case.
"""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncssh

from csdctl.emulation.limits import CpuLimit
from csdctl.emulation.processes import list_descendants, send_signal
from csdctl.worker.protocol.processes import load_stat

GRACE_S = 1.0
"""From SIGTERM to SIGKILL for a command after its client has disconnected."""
CHECK_INTERVAL_S = 1.0
CHUNK_BYTES = 1 << 16
LOGIN_UMASK = 0o022
"""The usual umask of a login: a node does not inherit the stricter one of `csdctl emulate up`."""


class Commands:
    """Run the commands of one node; `pids` are the processes that are waited for here."""

    def __init__(self, limit: CpuLimit, environment: dict[str, str], home: Path) -> None:
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
                self._end_group(child.pid)
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
                umask=LOGIN_UMASK,
                start_new_session=True,
            )
            self.pids.add(child.pid)
        finally:
            self.num_starting -= 1
        return child

    async def _forward(self, process: "asyncssh.SSHServerProcess[bytes]", child: Process) -> bool:
        """Forward the streams until the command has ended; return False if the client disconnects first."""
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
                await asyncio.wait(
                    {ended, lost}, timeout=CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                lost.cancel()
            return ended.done() and ended.exception() is None
        finally:
            stdin.cancel()
            ended.cancel()

    def _end_group(self, group: int) -> None:
        members = _members(group)
        send_signal(members, signal.SIGTERM)
        asyncio.get_running_loop().call_later(GRACE_S, lambda: send_signal(_members(group), signal.SIGKILL))


async def _forward_input(process: "asyncssh.SSHServerProcess[bytes]", child: Process) -> None:
    """Forward client input to the command with backpressure; send signals to its process group."""
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
            with suppress(OSError):  # the command no longer reads; further input is dropped
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
    """Return the processes of this node in process group `group`."""
    stats = {pid: load_stat(pid) for pid in list_descendants(os.getpid())}
    return [pid for pid, stat in stats.items() if stat and stat.group == group]
