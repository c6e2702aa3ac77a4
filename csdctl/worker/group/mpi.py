"""Entering MPI, the few of its calls that csdctl uses, waiting for them, and a limit to their memory.

mpi4py's lowercase calls (`allgather`, `bcast`, `recv`, …) unpickle what another rank sends, which runs
whatever code that rank wants. So this is the only module that imports mpi4py, and `World` offers calls that
move plain memory alone; ruff and a test hold both.

MPI's blocking calls poll without pause and burn the core that a slow node needs. Here a waiting process
sleeps until one of MPI's sockets is ready, then tests the request (docs/decisions/0003).
"""

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Any, NoReturn

from csdctl.worker.group.values import LinkLostError, PeerFaultError
from csdctl.worker.process.machine import data_bytes, limit_data

FIRST_SLEEP_S, LONGEST_SLEEP_S = 0.0001, 0.002
SLEEP_GROWTH = 1.3
"""Sleeps between the parts of a message that is arriving: each wake-up costs a slow node more."""
IDLE_S, LONGEST_IDLE_S, IDLE_SHARE = 0.02, 0.2, 0.1
"""A request is tested after so long, or this share of the wait so far, whether or not a socket was ready."""
QUIET_S = 0.05
"""`on_wait` is not called in waits shorter than this."""

FindMissing = Callable[[], list[int]]
OnWait = Callable[[float, FindMissing], None]
"""Called after each sleep with the seconds waited so far, and what finds the ranks that are waited for."""


def ignore_wait(waited_s: float, find_missing: FindMissing) -> None:
    """Do nothing: the default `OnWait`."""


def is_complete(request: Any) -> bool:
    """Return whether a request of `World` is complete, after all that has arrived was processed.

    Open MPI looks at its sockets in one of 8 calls.
    """
    return any(request.Test() for _ in range(8))


def wait_sleeping(request: Any, on_wait: OnWait = ignore_wait, find_missing: FindMissing = list) -> None:
    """Return when a request of `World` is complete; raises what its `Test` raises.

    `find_missing`: by default, it is not known who is waited for.
    """
    started_s, pause_s = time.monotonic(), FIRST_SLEEP_S
    waited_s = 0.0
    while not is_complete(request):
        idle_s = min(LONGEST_IDLE_S, max(IDLE_S, IDLE_SHARE * waited_s))
        if not ready or select.select(ready, [], [], idle_s)[0]:
            if is_complete(request):
                return
            time.sleep(pause_s)
            pause_s = min(LONGEST_SLEEP_S, pause_s * SLEEP_GROWTH)
        waited_s = time.monotonic() - started_s
        if waited_s > QUIET_S:
            on_wait(waited_s, find_missing)


ready: list[int] = []
"""Descriptors that are readable when MPI's sockets are ready to receive, or to send what is held back.

Empty for an MPI that does not use epoll: requests are then tested after short sleeps.
"""


def _find_epoll() -> list[int]:
    """Return the epoll descriptors of this process: of MPI, and maybe of libraries that are ready in vain."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
    return found


class Incoming:
    """A message that is being received from another rank; its size is known in advance."""

    __slots__ = ("_error", "_is_complete", "_num_bytes", "_rank", "_request", "_status")

    def __init__(self, request: Any, status: Any, error: type[Exception], rank: int, num_bytes: int) -> None:
        self._request, self._status, self._error = request, status, error
        self._rank, self._num_bytes = rank, num_bytes
        self._is_complete = False

    def Test(self) -> bool:
        """Return whether the message has arrived; raises PeerFaultError when it has another size."""
        if self._is_complete:
            return True
        try:
            if not self._request.Test(self._status):
                return False
        except self._error:  # MPI_ERR_TRUNCATE
            raise PeerFaultError(self._rank, f"sent more than the {self._num_bytes} bytes expected") from None
        num_bytes = self._status.count
        if num_bytes != self._num_bytes:
            raise PeerFaultError(self._rank, f"sent {num_bytes} bytes, expected {self._num_bytes}")
        self._is_complete = True
        return True


class World:
    """The ranks of one MPI job. A `start_` method returns a request, for `wait_sleeping`."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._communicator = mpi, communicator
        self._status = mpi.Status()
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def start_send(self, content: Any, rank: int, tag: int) -> Any:
        """Send the memory of `content`, which must not change before the request is complete."""
        return self._communicator.Isend(content, rank, tag)

    def start_receive(self, into: Any, rank: int, tag: int) -> Incoming:
        """Receive as many bytes as `into`, an array or memoryview, has."""
        request = self._communicator.Irecv(into, rank, tag)
        return Incoming(request, self._status, self._mpi.Exception, rank, into.nbytes)

    def start_sum(self, local: Any, total: Any) -> Any:
        """Sum `local` over all ranks into `total`, by MPI's own algorithm."""
        return self._communicator.Iallreduce(local, total)

    def first(self, num_ranks: int) -> "World":
        """Return the first ranks, for messages to and from rank 0; MPI's own collectives have all ranks."""
        world = World(self._mpi, self._communicator)
        world.size = num_ranks
        return world

    def library(self) -> str:
        """Return the name and version of the MPI library."""
        return str(self._mpi.Get_library_version()).split(",")[0]

    def finalize(self) -> None:
        """Leave MPI, when all other ranks do."""
        self._mpi.Finalize()


def init_mpi() -> World:
    """Initialize MPI; return all ranks of the job."""
    import mpi4py

    os.environ.setdefault("OMPI_MCA_opal_event_include", "epoll")
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    # Should a lowercase call come in all the same. mpi4py has no other way to set this.
    MPI.pickle.__init__(loads=_refuse_pickle)  # type: ignore[misc]
    ready[:] = _find_epoll()
    return World(MPI, MPI.COMM_WORLD)


def _refuse_pickle(*_: Any, **__: Any) -> NoReturn:
    raise LinkLostError("received a pickle over MPI; csdctl sends none")


BASE_BYTES, PER_RANK_BYTES, NUM_VECTORS = 1 << 30, 32 << 20, 8
"""Far above what is needed: MPI's buffers, vectors of every rank on rank 0, temporary ones of collectives."""


class MemoryLimit:
    """A limit to what this process may allocate from now on, for sums of vectors of `vector_bytes`.

    MPI keeps every message that nobody has asked for. Without a limit, a rank that sends on and on would fill
    the memory of another one's machine; with it, the process that receives ends, and its group is lost.
    """

    def __init__(self, world: World, vector_bytes: int) -> None:
        num_vectors = NUM_VECTORS + (0 if world.rank else 2 * world.size)
        allowance_bytes = BASE_BYTES + world.size * PER_RANK_BYTES + num_vectors * vector_bytes
        self._limit_bytes = data_bytes() + allowance_bytes
        self._largest_bytes = 0
        limit_data(self._limit_bytes)

    def allow(self, num_bytes: int) -> None:
        """Allow messages of this size together; of several calls, the largest size counts."""
        if num_bytes > self._largest_bytes:
            self._largest_bytes = num_bytes
            limit_data(self._limit_bytes + num_bytes)
