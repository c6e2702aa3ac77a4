"""Commands over SSH: started as sshd does, ended when their channel is lost.

A command runs with `/bin/sh -c` in the node's home, in its own session. When the client disconnects before
the command has ended, its process group is ended too (sshd would leave it). A command that has ended may
leave processes behind, as with sshd; a daemon has left the group and survives in any case.
"""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

import asyncssh

from csdctl.emulation.limits import CpuLimit
from csdctl.emulation.processes import list_descendants, load_stat, send_signal, wait_until_readable

GRACE_S = 1.0
"""From SIGTERM to SIGKILL for a command after its client has disconnected."""
CHECK_INTERVAL_S = 1.0
CHUNK_BYTES = 1 << 16
LOGIN_UMASK = 0o022
"""What a login usually has: a node does not inherit the stricter one of `csdctl emulate up`."""


class Commands:
    """Run the commands of one node; `pids` are the processes that are waited for here."""

    def __init__(self, limit: CpuLimit, environment: dict[str, str], home: Path) -> None:
        self._limit = limit
        self._environment = environment
        self._home = home
        self.pids: set[int] = set()

    async def run(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        """Serve one exec or shell request to its end."""
        child = self._start(process.command)
        self.pids.add(child.pid)
        finished = False
        try:
            finished = await self._forward(process, child)
        finally:
            if not finished:
                self._end_group(child.pid)
        if not finished:
            process.close()
        elif child.returncode >= 0:
            process.exit(child.returncode)
        else:
            process.exit_with_signal(signal.Signals(-child.returncode).name.removeprefix("SIG"))

    def _start(self, command: str | None) -> "subprocess.Popen[bytes]":
        shell = ["/bin/sh"] if command is None else ["/bin/sh", "-c", command]
        return subprocess.Popen(
            self._limit.build_command(shell),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=self._home,
            env=self._environment,
            umask=LOGIN_UMASK,
            start_new_session=True,
        )

    async def _forward(
        self, process: "asyncssh.SSHServerProcess[bytes]", child: "subprocess.Popen[bytes]"
    ) -> bool:
        """Forward the streams until the command has ended; return False if the client disconnects first."""
        # Not `process.redirect`: asyncssh 2.24 loses the end of the output when the client is slow.
        stdin = asyncio.create_task(_forward_input(process, child))
        ended: asyncio.Future[Any] = asyncio.gather(
            _forward_output(child.stdout, process.stdout),
            _forward_output(child.stderr, process.stderr),
            self._wait(child),
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

    async def _wait(self, child: "subprocess.Popen[bytes]") -> None:
        """Wait for the command without a thread."""
        handle = os.pidfd_open(child.pid)
        try:
            await wait_until_readable(handle)
        finally:
            os.close(handle)
            child.poll()
            self.pids.discard(child.pid)

    def _end_group(self, group: int) -> None:
        members = _members(group)
        send_signal(members, signal.SIGTERM)
        asyncio.get_running_loop().call_later(GRACE_S, lambda: send_signal(_members(group), signal.SIGKILL))


async def _forward_input(
    process: "asyncssh.SSHServerProcess[bytes]", child: "subprocess.Popen[bytes]"
) -> None:
    """Forward client input to the command with backpressure; send signals to its process group."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(_pipe_protocol, child.stdin)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    has_ended = False
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
            if not has_ended:
                try:
                    writer.write(content)
                    await writer.drain()
                except OSError:  # the command no longer reads; further input is dropped
                    has_ended = True
    finally:
        writer.close()


async def _forward_output(pipe: IO[bytes] | None, writer: "asyncssh.SSHWriter[bytes]") -> None:
    """Forward command output to the client with backpressure, until every writer has closed."""
    reader = asyncio.StreamReader(limit=CHUNK_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while content := await reader.read(CHUNK_BYTES):
            writer.write(content)
            await writer.drain()
    finally:
        transport.close()


def _pipe_protocol() -> asyncio.StreamReaderProtocol:
    return asyncio.StreamReaderProtocol(asyncio.StreamReader())


def _members(group: int) -> list[int]:
    """Return the processes of this node in process group `group`."""
    stats = {pid: load_stat(pid) for pid in list_descendants(os.getpid())}
    return [pid for pid, stat in stats.items() if stat and stat.group == group]
