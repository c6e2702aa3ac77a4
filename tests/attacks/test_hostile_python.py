"""Whole commands on a fleet in which one node's Python is the attacker's: the others go on."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.attacks.hostile_python import write_hostile_python
from tests.emulated.running import emulated, home_of, refuse
from tests.emulated.small_jobs import dense_model, save_arrays, small_job

pytestmark = [pytest.mark.attack(13), pytest.mark.emulated]

JOB = small_job("epochs: 1, learning_rate: 0.05")
MODEL = dense_model(4, 4, 1)
# What csdctl asks for is known from the text of the program that it sends, packed.
PYTHON = """\
import base64, re, zlib

program = " ".join(sys.argv)
if packed := re.search(r'b85decode."([^"]+)"', program):
    program = zlib.decompress(base64.b85decode(packed[1])).decode()
if "Lock a machine" in program:
    print("@csdctl-mine {}", flush=True)
    sys.stdin.read()
elif "Find processes" in program:
    print("@csdctl-result", CLEANING)
elif "Listen on this machine" in program:
    print("@csdctl-result", LISTENING, flush=True)
    sys.stdin.read()
elif " prepare" in program:
    print(PREPARING, flush=True)
elif "Receive files on a node" in program:
    print(RECEIVING, flush=True)
else:
    import os

    os.execv(PYTHON, [PYTHON, *sys.argv[1:]])
"""
NODES = ("csd0", "csd1")
HONEST = {
    "CLEANING": json.dumps(
        {"holder": None, "left": {"num_processes": 0, "runs": [], "paths": [], "num_bytes": 0}}
    ),
    "LISTENING": json.dumps({"ports": [1024]}),
    "PREPARING": "",
    "RECEIVING": "@csdctl-result {}",
}
INFO = {
    "path": "data",
    "num_samples": "many",
    "sample_shape": [4, 4, 1],
    "dtype": "uint8",
    "label_shape": [],
    "max_label": 2,
    "label_dtype": "int32",
    "fingerprint": "0123456789abcdef",
}
LIES = {
    "an object as a text": ("RECEIVING", '@csdctl-error {"message": {"a": 1}}'),
    "brackets in place of an answer": ("RECEIVING", "@csdctl-result " + "[" * 900_000),
    "a text as a number of samples": ("PREPARING", "@csdctl-result " + json.dumps(INFO)),
    "a list as progress": ("PREPARING", '@csdctl-progress {"num_done": [], "num_total": {}}'),
    "a list as a pid": ("CLEANING", '{"holder": {"pid": []}}'),
}
COMMANDS = {"RECEIVING": "deploy --tree tree", "PREPARING": "prepare", "CLEANING": "clean --yes"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("hostile"), 2, {"job.yaml": JOB, "model.py": MODEL}) as directory:
        content = yaml.safe_load((directory / "fleet.yaml").read_text())
        content["nodes"][1]["python"] = str(directory / "python")
        (directory / "fleet.yaml").write_text(yaml.safe_dump(content))
        for place in (directory / "public", *(home_of(directory, node) / "private" for node in NODES)):
            save_arrays(place, 9, 4, 4)
        yield directory


@pytest.mark.first(2)
@pytest.mark.parametrize("lie", LIES)
def test_command_reaches_the_other_node(fleet: Path, lie: str) -> None:
    program, answer = LIES[lie]
    texts = {**HONEST, "PYTHON": sys.executable, program: answer}
    body = "".join(f"{name} = {text!r}\n" for name, text in texts.items()) + PYTHON
    write_hostile_python(fleet / "python", body)
    (fleet / "tree").mkdir(exist_ok=True)
    (fleet / "tree" / "file").write_text(lie)
    said = refuse(fleet, *COMMANDS[program].split(), code=3)
    assert "csd1" in said
    assert not [words for words in ("problem: csd0", "bug in csdctl", "unexpected") if words in said]
    if program == "RECEIVING":
        assert (home_of(fleet, "csd0") / "tree" / "file").read_text() == lie
