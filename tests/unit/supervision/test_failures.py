"""Losses and failures as errors: type, node, message and remedy."""

from csdctl.errors import NodeError, OutOfMemoryError, RunError
from csdctl.supervision.membership import as_run_error


def test_loss_that_ends_the_run_is_a_run_error() -> None:
    error = as_run_error(NodeError("no power", node="csd0"))
    assert type(error) is RunError
    assert (error.node, error.message) == ("csd0", "no power")
    out_of_memory = OutOfMemoryError("killed", node="csd1")
    assert as_run_error(out_of_memory) is out_of_memory
