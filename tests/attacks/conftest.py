"""Fixtures of the lab and an SSH server, for the attacks."""

from tests.lab.conftest import job, lab, project  # noqa: F401
from tests.unit.transport.conftest import server  # noqa: F401
