"""States that nobody on the host has computed: claimed by a node, or put where a run looks for its own."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.runs.private import private_memory
from csdctl.worker.data.schedule import OwnSamples
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime, TaskSpec
from csdctl.worker.tasks.checkpointer import Checkpoints, StepFile
from csdctl.worker.tasks.progress import Position, max_state_bytes, pack, unpack
from tests.attacks.other_user import give, needs_root
from tests.linked_ranks import LINK_KEY
from tests.unit.worker.tasks.joined_ranks import JoinedRanks

HOST = (1.0, 40)

PROGRAM = """
import dataclasses, json, os, sys
import numpy as np
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.session import TASKS, RankSession
from csdctl.worker.tasks.task import FINISHED, ModelTask

hub_command = [sys.executable, "-m", "csdctl.worker", "hub", "--descriptor"]

spec, rank = from_json(RunSpec, open(sys.argv[1]).read()), int(sys.argv[2])
weight, steps = json.load(open("claims.json"))[rank]

class Holds(ModelTask):
    sum_sizes = ((1, 0),)
    max_message_bytes = 0
    values = [np.full(4, weight, np.float32)]

    def __init__(self, context):
        self.spec, self.me, self.progress = context.spec, context.me, context.progress
        self.reporter, self.is_root = context.reporter, context.me.rank == 0

    def load(self):
        self.progress.position = dataclasses.replace(self.progress.position, total_steps=steps)

    def run(self, communicator):
        held = [self.values[0].tolist(), self.progress.position.total_steps]
        print(json.dumps({"held": held}), flush=True)
        return FINISHED

    def finish(self, reason):
        pass

TASKS["holds"] = "__main__:Holds"
if rank == len(spec.ranks) - 1:
    exec(open("hostile.py").read())
RankSession(spec, rank, hub_command).run()
os._exit(0)
"""


def hold(directory: Path, claims: list[tuple[float, int]], hostile: str = "") -> list[Any]:
    """Let ranks that hold these weights and steps take part; return what each of them has once all do.

    `hostile`: code that the last rank runs first.
    """
    run_id = f"attack-{os.getpid()}-{time.monotonic_ns()}"
    rank_specs = [RankSpec(rank, f"m{rank}", 8, Runtime(), None, None, 0, 80) for rank in range(len(claims))]
    spec = RunSpec(
        *(run_id, "", "", Recipe(), tuple(rank_specs), None, None, ""),
        task=TaskSpec("holds"),
        link_key=LINK_KEY,
    )
    (directory / "program.py").write_text(PROGRAM)
    (directory / "claims.json").write_text(json.dumps(claims))
    (directory / "hostile.py").write_text(hostile)
    with JoinedRanks(spec, directory, directory / "program.py") as ranks:
        for rank in range(len(claims)):
            ranks.start(rank)
        ranks.begin(*range(1, len(claims)))

        def held() -> list[Any]:
            said = [what for rank in range(len(claims)) for what in ranks.of(rank)]
            return [(what["held"][0][0], what["held"][1]) for what in said if isinstance(what, dict)]

        ranks.until(lambda: len(held()) == len(claims))
        return held()


@pytest.mark.attack(8)
@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        pytest.param([HOST, (2.0, 39), (666.0, 10**6)], HOST, id="far ahead"),
        pytest.param([HOST, (2.0, 39), (666.0, 40)], HOST, id="other weights at the same step"),
        pytest.param([(1.0, 0), (7.0, 40), (7.0, 40)], (1.0, 0), id="the host has lost everything"),
    ],
)
def test_all_ranks_get_what_the_host_has(
    tmp_path: Path, claims: list[tuple[float, int]], expected: tuple[float, int]
) -> None:
    assert hold(tmp_path, claims) == [expected] * 3


LIE = """
from csdctl.worker.tasks import session
honest, values = session.hash_state, [np.full(4, 1.0, np.float32)]
session.hash_state = lambda _, position: honest(values, dataclasses.replace(position, total_steps=40))
"""


@pytest.mark.attack(8)
def test_node_that_pretends_to_have_the_hosts_state_deceives_only_itself(tmp_path: Path) -> None:
    claim = (666.0, 10**6)
    assert hold(tmp_path, [HOST, (2.0, 39), claim], LIE) == [HOST, HOST, claim]


@pytest.mark.attack(8)
@pytest.mark.parametrize("answer", ["'x' * 64", "''", "'[1, 2]'", "'\\0' * 60_000"])
def test_node_that_sends_no_hash_gets_what_the_host_has(tmp_path: Path, answer: str) -> None:
    code = f"from csdctl.worker.tasks import session\nsession.hash_state = lambda *_: {answer}"
    assert hold(tmp_path, [HOST, HOST, (666.0, 10**6)], code) == [HOST] * 3


def variables(fill: float) -> list[Any]:
    return [np.full(1000, fill, np.float32)]


OWN = [OwnSamples(0, 80)]
AHEAD = Position(1, 5, 10**6, None, {"0": 8})


def write_state(path: Path, fill: float = 666.0) -> Path:
    """Write a step file with a state far ahead, as a run of the attacker's would."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file = StepFile(path, variables(fill))
    file.write(variables(fill), AHEAD)
    return path


@pytest.mark.attack(14)
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(give, id="another user's", marks=needs_root),
        pytest.param(lambda path: path.chmod(0o602), id="writable by others"),
        pytest.param(lambda path: path.chmod(0o640), id="readable by its group"),
        pytest.param(lambda path: os.link(path, path.with_name("another")), id="with another name"),
        pytest.param(
            lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))), id="symbolic link"
        ),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path, 0o600)), id="pipe"),
        pytest.param(lambda path: give(path.parent), id="in another user's directory", marks=needs_root),
        pytest.param(lambda path: path.parent.chmod(0o702), id="in a directory of others"),
        pytest.param(lambda path: path.parent.chmod(0o770), id="in a directory of its group"),
    ],
)
def test_step_file_that_another_user_may_have_written_is_neither_read_nor_written(
    tmp_path: Path, plant: Callable[[Path], object]
) -> None:
    path = write_state(tmp_path / "memory" / "state")
    assert StepFile(path, variables(0)).read() is not None
    before = path.read_bytes()
    plant(path)
    with pytest.raises(OSError, match="expected|symbolic|directory"):
        StepFile(path, variables(0)).read()
    with pytest.raises(OSError, match="expected|symbolic|directory"):
        StepFile(path, variables(0)).write(variables(1), AHEAD)
    if path.is_file():
        assert path.read_bytes() == before


@pytest.mark.attack(14)
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda place: place.chmod(0o770), id="open to its group"),
        pytest.param(lambda place: (place.rmdir(), place.symlink_to(place.parent)), id="link"),
        pytest.param(lambda place: (place.rmdir(), place.write_text("")), id="file"),
        pytest.param(give, id="another user's", marks=needs_root),
    ],
)
def test_directory_of_another_user_is_not_used_for_step_files(
    tmp_path: Path, plant: Callable[[Path], object]
) -> None:
    directory = private_memory(tmp_path)
    assert directory == tmp_path / f"csdctl-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert private_memory(tmp_path) == directory
    plant(directory)
    assert private_memory(tmp_path) is None


READ = """
import resource, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tests.attacks.test_state import load_saved
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = load_saved(Path(sys.argv[2]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(found, grown // 1024)
"""
MAX_GROWTH_MIB = 64
"""The state has 4 kB."""


def load_saved(directory: Path) -> list[int]:
    """Return the steps of the states that a resumed run could take from `directory`."""
    state = StepFile(directory / "step.state", variables(0)).read()
    limit = max_state_bytes(variables(0))
    states = [*([] if state is None else [state]), *Checkpoints(directory).newest_first(limit)]
    return [unpack(state, variables(0), OWN)[0].total_steps for state in states]


def steps_and_growth(directory: Path) -> tuple[str, int]:
    """Return what a process finds in `directory`, and by how many MiB that makes it grow."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(Path(__file__).parents[2]), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps, _, grown = done.stdout.strip().rpartition(" ")
    return steps, int(grown)


@pytest.mark.attack(14)
def test_step_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = write_state(tmp_path / "step.state")
    os.truncate(path, 1 << 40)
    assert steps_and_growth(tmp_path) == ("[]", 0)


def npy(content: bytes, shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    """An array of .npy whose header says whatever it likes."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


class Command:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo ran >> {self.marker}",)


CHECKPOINTS = {
    "a terabyte in its header": lambda _: npy(b"", (1 << 40,)),
    "a gigabyte of zeros, packed": lambda _: npy(bytes(1 << 30), (1 << 30,)),
    "objects": lambda marker: npy(pickle.dumps([Command(marker)]), (1,), "|O"),
    "a header that is code": lambda marker: npy(b"", (0,)).replace(b"'|u1'", b"exit()"),
}


@pytest.mark.attack(14)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_that_lies_is_skipped_at_no_cost(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    packed = pack(variables(1), dataclasses.replace(AHEAD, total_steps=40))
    Checkpoints(tmp_path).save(packed, dataclasses.replace(AHEAD, total_steps=40))
    with zipfile.ZipFile(tmp_path / "step-99999999.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("state.npy", CHECKPOINTS[name](marker))
    steps, grown = steps_and_growth(tmp_path)
    assert steps == "[40]"
    assert grown < MAX_GROWTH_MIB
    assert not marker.exists()
