"""What the attacks share."""

from tests.unit.transport.conftest import server  # noqa: F401
