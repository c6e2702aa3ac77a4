"""What a node that failed is told to do."""

import pytest

from csdctl.workflows.provision.provision import NodeSummary, PlaybookResult, _judge

FAILED = NodeSummary(ok=3, changed=1, failed=1, unreachable=0, skipped=2)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Install the wheels: ERROR: [Errno 28] No space left on device", "df -h"),
        ("Look for a Python: Task failed: Missing sudo password", "sudo without a password"),
        ("Check MPI: it crashed", "fix it"),
    ],
)
def test_failed_task_has_a_remedy_for_its_cause(message: str, remedy: str) -> None:
    played = PlaybookResult({"csd0": FAILED}, {"csd0": message})
    outcome = _judge("csd0", played)
    assert outcome.error
    assert outcome.error.message == message
    assert remedy in outcome.error.remedy
