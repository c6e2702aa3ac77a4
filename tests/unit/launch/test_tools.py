"""mpirun, and the prefix that it gets."""

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.launch.mpi_command import choose_prefix, find_mpirun


def test_this_environment_has_mpirun() -> None:
    assert find_mpirun().name == "mpirun"


def test_nodes_share_one_prefix_or_the_error_lists_them() -> None:
    facts = {"csd0": Facts("csd0", prefix="/opt/a"), "csd1": Facts("csd1", prefix="/opt/b")}
    assert choose_prefix(["csd0"], facts) == "/opt/a"
    with pytest.raises(InputError, match="/opt/a, /opt/b"):
        choose_prefix(["csd0", "csd1"], facts)
