"""The user's own defaults, as the command line reads them."""

from pathlib import Path

import pytest
import typer

from csdctl.cli.app import app
from csdctl.cli.commands.train import build_background_arguments
from csdctl.cli.defaults import config_path, load_defaults
from csdctl.errors import InputError


def load(tmp_path: Path, text: str, *arguments: str) -> dict[str, object]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_defaults(path, app, arguments)


def test_path_follows_the_desktop_convention() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/etc/mine"}) == Path("/etc/mine/csdctl/config.yaml")
    assert config_path({}) == Path.home() / ".config" / "csdctl" / "config.yaml"


def test_no_file_is_no_default(tmp_path: Path) -> None:
    assert load_defaults(tmp_path / "config.yaml", app, ["train"]) == {}


def test_defaults_of_all_commands_and_of_one(tmp_path: Path) -> None:
    text = "all: {fleet: ~/lab.yaml, keep: 9}\ntrain: {min-nodes: 3, limit: [csd0, csd1], rebalance: false}\n"
    expected = {
        "fleet": str(Path("~/lab.yaml").expanduser()),
        "keep": 9,
        "min_nodes": 3,
        "limit": ["csd0", "csd1"],
        "rebalance": False,
    }
    assert load(tmp_path, text, "train", "job.yaml") == {"train": expected}
    assert load(tmp_path, text, "discover") == {"discover": {"fleet": expected["fleet"]}}
    assert load(tmp_path, "emulate: {up: {nodes: 4}}", "emulate", "up") == {"emulate": {"up": {"nodes": 4}}}


@pytest.mark.parametrize("order", [("all", "train", "emulate"), ("emulate", "train", "all")])
def test_section_of_a_command_comes_before_that_of_all_commands(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    sections = {
        "all": "all: {fleet: lab.yaml, keep: 9, nodes: 2}\n",
        "train": "train: {keep: 3}\n",
        "emulate": "emulate: {up: {nodes: 4}}\n",
    }
    text = "".join(sections[name] for name in order)
    assert load(tmp_path, text, "train") == {"train": {"fleet": "lab.yaml", "keep": 3}}
    assert load(tmp_path, text, "emulate", "up") == {"emulate": {"up": {"fleet": "lab.yaml", "nodes": 4}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trian: {keep: 5}", "unknown command 'trian'"),
        ("train: 5", "train: received 5, expected options"),
        ("train: {keeep: 5}", "train has no option 'keeep'"),
        ("train: {keep: many}", "train: keep: received 'many'"),
        ("train: {keep: [1, 2]}", "expected one value"),
        ("clean: {yes: true}", "clean has no option 'yes'"),
        ("emulate: {upp: {nodes: 4}}", "received 'upp'"),
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
