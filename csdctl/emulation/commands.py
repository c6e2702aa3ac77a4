"""Commands that come over SSH: started as sshd does, ended when their channel is lost.

A command runs through `/bin/sh -c` in the node's home, in a session of its own. When the client goes
away before the command has ended, its process group is ended too (sshd would leave it). A command
that ended by itself may leave processes behind, as with sshd; one that daemonized itself has left
the group and survives in any case.
"""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

import asyncssh

from csdctl.emulation.limits import CpuLimit
from csdctl.emulation.processes import list_descendants, load_stat, send_signal

GRACE_S = 1.0
"""From SIGTERM to SIGKILL for a command whose client is gone."""
LOOK_INTERVAL_S = 1.0
CHUNK_BYTES = 1 << 16


class Commands:
    """Runs the commands of one node; `pids` are those that are waited for here."""

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
            finished = await self._attend(process, child)
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
            start_new_session=True,
        )

    async def _attend(
        self, process: "asyncssh.SSHServerProcess[bytes]", child: "subprocess.Popen[bytes]"
    ) -> bool:
        """Carry the streams until the command has ended; False when the client went away first."""
        # Not `process.redirect`: asyncssh 2.24 loses the end of the output when the client is slow.
        stdin = asyncio.create_task(_carry_in(process, child))
        ended: asyncio.Future[Any] = asyncio.gather(
            _carry_out(child.stdout, process.stdout),
            _carry_out(child.stderr, process.stderr),
            self._wait(child),
        )
        try:
            while not ended.done() and not process.is_closing():
                lost: asyncio.Future[Any] = asyncio.ensure_future(process.wait_closed())
                # With a deadline, because input that nobody reads holds back the news of the end.
                await asyncio.wait(
                    {ended, lost}, timeout=LOOK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                lost.cancel()
            return ended.done() and ended.exception() is None
        finally:
            stdin.cancel()
            ended.cancel()

    async def _wait(self, child: "subprocess.Popen[bytes]") -> None:
        """Wait for the command without a thread."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handle = os.pidfd_open(child.pid)
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
            child.poll()
            self.pids.discard(child.pid)

    def _end_group(self, group: int) -> None:
        members = _members(group)
        send_signal(members, signal.SIGTERM)
        asyncio.get_running_loop().call_later(GRACE_S, lambda: send_signal(_members(group), signal.SIGKILL))


async def _carry_in(process: "asyncssh.SSHServerProcess[bytes]", child: "subprocess.Popen[bytes]") -> None:
    """From the client to the command, no faster than it reads; signals go to its process group."""
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
                except OSError:  # the command reads no more; what still comes is dropped
                    has_ended = True
    finally:
        writer.close()


async def _carry_out(pipe: IO[bytes] | None, writer: "asyncssh.SSHWriter[bytes]") -> None:
    """From the command to the client, no faster than it takes it, until every writer has closed."""
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
    """The processes of this node that are in process group `group`."""
    stats = {pid: load_stat(pid) for pid in list_descendants(os.getpid())}
    return [pid for pid, stat in stats.items() if stat and stat.group == group]
