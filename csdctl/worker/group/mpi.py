"""Entering MPI."""

from typing import Any


def init_mpi() -> tuple[Any, Any]:
    """Initialize MPI; return mpi4py's MPI module and COMM_WORLD."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    return MPI, MPI.COMM_WORLD
