"""Machines that receive files: this one, and one behind a small real SSH server."""

from tests.unit.transport.conftest import machine, server, ssh  # noqa: F401
