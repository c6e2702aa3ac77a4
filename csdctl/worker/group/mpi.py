"""Entering MPI, and the few of its calls that csdctl uses.

mpi4py's lowercase calls (`allgather`, `bcast`, `recv`, …) unpickle what another rank sends, which runs
whatever code that rank wants. So this is the only module that imports mpi4py, and `World` offers calls that
move plain memory alone; ruff and a test hold both.
"""

from typing import Any, NoReturn

from csdctl.worker.group.channel import LinkLostError, PeerFaultError


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
    """The ranks of one MPI job. A `start_` method returns a request, for `waiting.wait_sleeping`."""

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

    def start_barrier(self) -> Any:
        """Wait for all ranks."""
        return self._communicator.Ibarrier()

    def split(self, color: int) -> "World":
        """Return the ranks that call with the same `color`, in the same order."""
        return World(self._mpi, self._communicator.Split(color, self.rank))

    def free(self) -> None:
        """Free what `split` returned."""
        self._communicator.Free()

    def library(self) -> str:
        """Return the name and version of the MPI library."""
        return str(self._mpi.Get_library_version()).split(",")[0]

    def finalize(self) -> None:
        """Leave MPI, when all other ranks do."""
        self._mpi.Finalize()


def init_mpi() -> World:
    """Initialize MPI; return all ranks of the job."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    # Should a lowercase call come in all the same. mpi4py has no other way to set this.
    MPI.pickle.__init__(loads=_refuse_pickle)  # type: ignore[misc]
    return World(MPI, MPI.COMM_WORLD)


def _refuse_pickle(*_: Any, **__: Any) -> NoReturn:
    raise LinkLostError("received a pickle over MPI; csdctl sends none")
