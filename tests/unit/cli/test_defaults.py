"""The user's own defaults, as the command line reads them."""

from io import StringIO
from pathlib import Path

import pytest
import typer

from csdctl.cli.app import app, run_command
from csdctl.cli.commands.fleet import list_settings
from csdctl.cli.commands.training import build_background_arguments
from csdctl.cli.defaults import load_defaults
from csdctl.errors import ExitCode, InputError
from csdctl.fleet.model import Fleet, Host
from csdctl.terminal.doctor import Setting
from csdctl.terminal.streams import Streams


def load(tmp_path: Path, text: str, *arguments: str) -> dict[str, object]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_defaults(path, app, arguments)


def test_defaults_of_all_commands_and_of_one(tmp_path: Path) -> None:
    text = "all: {fleet: ~/lab.yaml, keep: 9}\n"
    text += "train: {keep: 3, min-nodes: 3, limit: [csd0, csd1], rebalance: false}\n"
    expected = {
        "fleet": str(Path("~/lab.yaml").expanduser()),
        "keep": 3,
        "min_nodes": 3,
        "limit": ["csd0", "csd1"],
        "rebalance": False,
    }
    assert load(tmp_path, text, "train", "job.yaml") == {"train": expected}
    assert load(tmp_path, text, "discover") == {"discover": {"fleet": expected["fleet"]}}
    assert load(tmp_path, "emulate: {up: {nodes: 4}}", "emulate", "up") == {"emulate": {"up": {"nodes": 4}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trian: {keep: 5}", "unknown command 'trian'"),
        ("train: 5", "train: received 5, expected options"),
        ("train: {keeep: 5}", "train has no option 'keeep'"),
        ("train: {keep: [1, 2]}", "expected one value"),
        ("clean: {yes: true}", "clean has no option 'yes'"),
        ("emulate: {upp: {nodes: 4}}", "received 'upp'"),
        ("emulate: {up: 5}", "received 'up'"),
        ("- train", "expected commands with their options"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    for command in ("train", "clean", "emulate up"):
        if text.startswith(command.split()[0]) or not text.startswith(("train:", "clean", "emulate")):
            with pytest.raises(InputError, match=expected.replace("(", r"\(")):
                load(tmp_path, text, *command.split())


def test_detach_as_a_default_starts_one_process(tmp_path: Path) -> None:
    defaults = load(tmp_path, "train: {detach: true}\n", "train")
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    words = build_background_arguments(["-v", "train", "--json", "job.yaml"])
    assert words == ["-v", "train", "--no-detach", "job.yaml"]
    for given, expected in (([], True), (words[2:], False)):
        parsed = train.make_context("train", given, default_map=defaults["train"])
        assert parsed.params["detach"] is expected


def test_mistake_in_the_file_of_defaults_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csdctl").mkdir()
    path = tmp_path / "csdctl" / "config.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for text, said in (
        ("train: {keeep: 5}", "train has no option 'keeep'"),
        ("train: {keep: many}", "'--keep'"),
    ):
        path.write_text(text)
        stdout = StringIO()
        assert run_command(["train", "--json"], Streams(stdout, StringIO())) == ExitCode.BAD_INPUT
        assert said in stdout.getvalue()


def test_doctor_says_where_each_setting_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = load(tmp_path, "doctor: {mpi-timeout: 70, timeout: 71, connect-timeout: 72}\n", "doctor")
    monkeypatch.setenv("CSDCTL_CONNECT_TIMEOUT", "9")
    monkeypatch.setenv("CSDCTL_TIMEOUT", "8")
    monkeypatch.delenv("CSDCTL_FLEET", raising=False)
    doctor = typer.main.get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    words = ["--timeout", "7", "--limit", "a", "--limit", "b"]
    context = doctor.make_context("doctor", words, default_map=defaults["doctor"])
    settings = list_settings(context, Fleet((), Host(threads=3), path=Path("lab.yaml")))
    assert settings == [
        Setting("fleet", "fleet.yaml", "default"),
        Setting("timeout", "7.0", "flag --timeout"),
        Setting("connect-timeout", "9.0", "environment CSDCTL_CONNECT_TIMEOUT"),
        Setting("mpi-timeout", "70.0", "file config.yaml"),
        Setting("limit", "a,b", "flag --limit"),
        Setting("exclude", "", "default"),
        Setting("network", "", "default"),
        Setting("host.threads", "3", "file lab.yaml"),
    ]
