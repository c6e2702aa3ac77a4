"""The fleet that the tests of supervision share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.supervision.scripted_ranks import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two nodes; however the run ends, none of its processes may be left."""
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.assert_nothing_left()
