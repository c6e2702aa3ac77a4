"""`csdctl demo` as a user runs it: Fashion-MNIST on an emulated host and two nodes."""

from pathlib import Path

import pytest

from tests.emulated.running import csdctl, document, succeed

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]


def test_demo_shows_its_commands_and_reaches_085_accuracy_on_fashion_mnist(tmp_path: Path) -> None:
    directory = tmp_path / "demo with a space"
    try:
        done = succeed(tmp_path, "demo", "--nodes", "2", "--directory", directory.name)
        log = done.stdout + done.stderr
        for command in ("emulate up", "discover", "prepare", "tune", "train", "report"):
            assert f"$ csdctl {command}" in log
        assert any(line.startswith("run directory:") for line in log.splitlines()[-8:])
        report = document(directory, "report")
        assert (report["state"], report["emulated"]) == ("completed", True)
        assert report["validation_accuracy"] >= 0.85
        assert report["samples"] == 60_000 * report["epochs"]
        assert [rank["num_private"] for rank in report["ranks"]] == [0, 4286, 4285]
        following = [line.partition("#")[0].split() for line in log.splitlines()[-3:]]
        assert [words[1] for words in following] == ["emulate", "predict", "train"]
        for words in following[:2]:
            succeed(directory, *words[1:])
    finally:
        csdctl(directory, "emulate", "down")
