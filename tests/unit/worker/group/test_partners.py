"""Which ranks Open MPI really connects: the preflight tries these pairs."""

import os
import re
import sys
from pathlib import Path

import pytest

from csdctl.fleet.checks import pairs_to_try
from csdctl.launch.mpirun import ALLOW_ROOT, COMMON_OPTIONS
from tests.patience import run_command

NUM_RANKS = 7
PROGRAM = """
import numpy as np
from csdctl.worker.group.collective import choose_collective
from csdctl.worker.group.mpi import init_mpi
from csdctl.worker.group.messages import allgather
world = init_mpi()
if world.rank < 5:
    choose_collective(world.first(5), np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32), "star")
choose_collective(world, np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32), "star")
allgather(world, b"x" * (10 + world.rank))
allgather(world, b"y" * 200_000)
"""
CONNECTS = re.compile(r"\[1,(\d+)\]<stderr>:.*attempting to connect\(\) to \[\[\d+,1\],(\d+)\]")


@pytest.mark.fault(50)
def test_pairs_that_must_connect_are_those_that_open_mpi_connects() -> None:
    options = [word for option in COMMON_OPTIONS for word in option.split() if "node" not in option]
    options += ["--map-by", ":OVERSUBSCRIBE", "--mca", "btl_tcp_if_include", "127.0.0.0/8"]
    done = run_command(
        [
            *(str(Path(sys.prefix) / "bin" / "mpirun"), *options, "--mca", "btl_base_verbose", "100"),
            *("-np", str(NUM_RANKS), sys.executable, "-c", PROGRAM),
        ],
        env={**os.environ, **ALLOW_ROOT},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Open MPI's own messages come on the standard error of the rank, which mpirun passes on.
    connected = {tuple(sorted(map(int, pair))) for pair in CONNECTS.findall(done.stderr + done.stdout)}
    tried = pairs_to_try([str(rank) for rank in range(NUM_RANKS)])
    pairs = {tuple(sorted((int(one), int(other)))) for one, others in tried.items() for other in others}
    assert connected == pairs
