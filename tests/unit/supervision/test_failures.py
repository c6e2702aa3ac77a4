"""Losses and failures as errors: type, node, message and remedy."""

import pytest

from csdctl.errors import CsdctlError, InputError, NodeError, OutOfMemoryError, RunError
from csdctl.supervision.membership import as_run_error, as_run_failure
from csdctl.worker.protocol.events import Failed


@pytest.mark.parametrize(("exit_code", "error_type"), [(1, RunError), (2, InputError)])
def test_failure_of_the_run_keeps_its_exit_code(exit_code: int, error_type: type[CsdctlError]) -> None:
    error = as_run_failure(Failed(1, "csd0", "disk full", "make room", exit_code))
    assert type(error) is error_type
    assert (error.node, error.message, error.remedy) == ("csd0", "disk full", "make room")


def test_loss_that_ends_the_run_is_a_run_error() -> None:
    error = as_run_error(NodeError("no power", node="csd0"))
    assert type(error) is RunError
    assert (error.node, error.message) == ("csd0", "no power")
    out_of_memory = OutOfMemoryError("killed", node="csd1")
    assert as_run_error(out_of_memory) is out_of_memory
