"""The commands on the machines of a fleet, without machines."""

from pathlib import Path

import pytest
import typer

from csdctl.cli.app import app
from csdctl.cli.commands.fleet import list_settings
from csdctl.fleet.model import Fleet, Host
from csdctl.terminal.fleet import Setting


def test_doctor_says_where_each_setting_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSDCTL_CONNECT_TIMEOUT", "9")
    monkeypatch.setenv("CSDCTL_TIMEOUT", "8")
    for name in ("CSDCTL_FLEET", "CSDCTL_MPI_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    doctor = typer.main.get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    context = doctor.make_context("doctor", ["--timeout", "7", "--limit", "a", "--limit", "b"])
    settings = list_settings(context, Fleet((), Host(threads=3), path=Path("lab.yaml")))
    assert settings == [
        Setting("fleet", "fleet.yaml", "default"),
        Setting("timeout", "7.0", "flag --timeout"),
        Setting("connect-timeout", "9.0", "environment CSDCTL_CONNECT_TIMEOUT"),
        Setting("mpi-timeout", "60.0", "default"),
        Setting("limit", "a,b", "flag --limit"),
        Setting("exclude", "", "default"),
        Setting("network", "", "default"),
        Setting("host.threads", "3", "file lab.yaml"),
    ]
