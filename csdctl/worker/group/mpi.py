"""Entering MPI, the few of its calls that csdctl uses, and a limit to their memory.

mpi4py's lowercase calls (`allgather`, `bcast`, `recv`, …) unpickle what another rank sends, which runs its
code. So only this module imports mpi4py, and `World` moves only plain memory. Ruff and a test hold both.

Blocking calls burn the core that a slow node needs: a waiting process sleeps until one of MPI's sockets is
ready, then tests the request (docs/decisions/0003).
"""

import contextlib
import os
from typing import Any, NoReturn

from csdctl.worker.group.values import LinkLostError, PeerFaultError
from csdctl.worker.process.machine import data_bytes, limit_data

NUM_LOOKS = 2
"""Number of tests of a request: Open MPI does not poll its sockets in every call."""
BASE_BYTES, NUM_VECTORS = 1 << 29, 4
"""Memory of a link, far above its need: MPI's buffers, unexpected messages, and this many vectors."""


def _find_epoll() -> list[int]:
    """Return the epoll descriptors of this process: of MPI, and maybe of libraries that are ready in vain."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                descriptors.append(int(name))
    return descriptors


class Incoming:
    """A message that is being received from the other rank. Its size is known in advance."""

    __slots__ = ("_error", "_num_bytes", "_request", "_status", "is_complete")

    def __init__(self, request: Any, status: Any, error: type[Exception], num_bytes: int) -> None:
        self._request, self._status, self._error, self._num_bytes = request, status, error, num_bytes
        self.is_complete = False
        """Whether the latest `Test` has found that it has arrived."""

    def Test(self, num_looks: int = 1) -> bool:
        """Return whether the message has arrived, asking MPI `num_looks` times. Raises PeerFaultError."""
        test, status = self._request.Test, self._status
        try:
            while not self.is_complete and num_looks:
                self.is_complete, num_looks = test(status), num_looks - 1
                if self.is_complete and status.count != self._num_bytes:
                    raise PeerFaultError(1, f"sent {status.count} bytes, expected {self._num_bytes}")
        except self._error:  # MPI_ERR_TRUNCATE
            raise PeerFaultError(1, f"sent more than the {self._num_bytes} bytes expected") from None
        return self.is_complete

    def cancel(self) -> None:
        """Receive it no more. It may have arrived."""
        if not self.is_complete:
            self._request.Cancel()
            self._request.Wait()


class World:
    """The two ranks of one MPI job: this one and its peer. A `start_` method returns a request."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._communicator = mpi, communicator
        self._status = mpi.Status()
        self.ready = _find_epoll()
        """Descriptors that are readable when MPI's sockets can receive, or send what is held back.

        Empty for an MPI that does not use epoll: requests are then tested after short sleeps.
        """
        self.rank: int = communicator.rank
        self._peer = 1 - self.rank
        self.finalize: Any = mpi.Finalize  # waits for the other rank's

    def start_send(self, content: Any, tag: int) -> Any:
        """Send the memory of `content`, which must not change before the request is complete."""
        return self._communicator.Isend(content, self._peer, tag)

    def start_receive(self, into: Any, tag: int) -> Incoming:
        """Receive as many bytes as `into`, a memoryview, has."""
        request = self._communicator.Irecv(into, self._peer, tag)
        return Incoming(request, self._status, self._mpi.Exception, into.nbytes)


def init_mpi() -> World:
    """Initialize MPI. Return the ranks of the job."""
    import mpi4py

    os.environ.setdefault("OMPI_MCA_opal_event_include", "epoll")
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    # A second safeguard against lowercase calls. mpi4py has no other way to set this.
    MPI.pickle.__init__(loads=_refuse_pickle)  # type: ignore[misc]
    return World(MPI, MPI.COMM_WORLD)


def _refuse_pickle(*_: Any, **__: Any) -> NoReturn:
    raise LinkLostError("received a pickle over MPI; csdctl sends none")


def limit_memory(vector_bytes: int, max_bytes: int) -> None:
    """Limit memory, for vectors and messages of this many bytes: MPI buffers every unexpected message."""
    limit_data(data_bytes() + BASE_BYTES + NUM_VECTORS * (vector_bytes + max_bytes))
