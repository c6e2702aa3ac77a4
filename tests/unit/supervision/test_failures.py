"""Losses and failures as errors: type, node, message and remedy."""

from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, InputError, NodeError, OutOfMemoryError, RunError
from csdctl.launch.mpi_job import JobOutcome
from csdctl.supervision import failures
from csdctl.worker.protocol.events import Failed

LOGS = Path("runs/7/logs")
LOSSES = [NodeError("no power", node="csd0"), NodeError("no network", node="csd1")]


@pytest.mark.parametrize(("exit_code", "error_type"), [(1, RunError), (2, InputError)])
def test_failure_of_the_run_keeps_its_exit_code(exit_code: int, error_type: type[CsdctlError]) -> None:
    error = failures.as_run_failure(Failed(1, "csd0", "disk full", "make room", exit_code))
    assert type(error) is error_type
    assert (error.node, error.message, error.remedy) == ("csd0", "disk full", "make room")


def test_loss_that_ends_the_run_is_a_run_error() -> None:
    error = failures.as_run_error(LOSSES[0])
    assert type(error) is RunError
    assert (error.node, error.message) == ("csd0", "no power")
    out_of_memory = OutOfMemoryError("killed", node="csd1")
    assert failures.as_run_error(out_of_memory) is out_of_memory


def test_incomplete_run_shows_the_loss_rather_than_the_reason() -> None:
    error = failures.incomplete("mpirun exited", LOSSES[0], ["csd0", "csd1"], LOGS)
    assert error.message == "no power\nThe run has no completion record from csd0, csd1"
    assert error.node == "csd0"
    assert failures.incomplete("mpirun exited", None, ["csd0"], LOGS).message.startswith("mpirun exited\n")


def test_run_with_too_few_nodes_lists_the_losses_and_how_to_resume() -> None:
    error = failures.too_few_nodes(1, 2, LOSSES, "20261122-100000")
    assert error.message == "nodes left: 1, but --min-nodes is 2; lost:\n  csd0: no power\n  csd1: no network"
    assert error.remedy.endswith("csdctl train --resume 20261122-100000")


def test_run_without_checkpoints_does_not_suggest_resuming() -> None:
    error = failures.ranks_missing(3, LOSSES)
    assert error.message == "all 3 ranks are required; lost:\n  csd0: no power\n  csd1: no network"
    assert "resume" not in error.remedy


def test_mpirun_failure_names_the_node_and_the_logs() -> None:
    outcome = JobOutcome(stderr_tail=["process rank 1 with PID 7 exited on signal 9"])
    error = failures.mpirun_failure(outcome, ["host", "csd1"], LOGS)
    assert error.node == "csd1"
    assert error.remedy.endswith("; logs: runs/7/logs")
