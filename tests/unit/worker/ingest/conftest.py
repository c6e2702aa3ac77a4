"""What the tests of sources share."""

from pathlib import Path

import pytest

from csdctl.worker.protocol.datasets import PrepareSpec


@pytest.fixture
def root(spec: PrepareSpec) -> Path:
    """The source of a file's own fixture `spec`."""
    return Path(spec.source)
