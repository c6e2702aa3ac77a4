"""Whatever becomes of a file of .csdctl: commands name it and say what to do, or do not need it.

The project has a run that has completed, a later one that was stopped, and a fleet whose node is off.
"""

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.cli.app import run_command
from csdctl.documents import save_json
from csdctl.launch.leftovers import describe_holder
from csdctl.runs.directory import EVENT_BYTES, NO_LINK, NUM_KILLED, ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.terminal.streams import Streams
from csdctl.tuning.plan import Plan, save_plan
from csdctl.worker.protocol.events import CheckpointSaved, EpochEnd, Finished, Progress, describe_model
from csdctl.worker.protocol.json_codec import add_check, remove_check, to_json
from tests.unit.runs.manifests import manifest_of, spec_of, write_events

pytestmark = pytest.mark.fault(36)

NODES = ("host", "csd0")
PROGRESS = Progress(0, "host", 2, 7, 7, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
END = EpochEnd(0, "host", 2, 10, 96, 0.5, 0.25, 2.0, "hash", 128, 2.25, 0.5, 2.5, 0.25)
DONE = [Finished(rank, node, 2, 20, "hash", 1 << 20) for rank, node in enumerate(NODES)]
BEST = CheckpointSaved(0, "host", 3, 20, "checkpoints/step-00000020.npz", is_best=True)
JOB = "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epochs: 2, learning_rate: 0.1}\n"
OLD, NEW = "20260101-000000-000001", "20260102-000000-000002"
LIST, REPORT, LOGS, PRIVACY = "runs list", "report", "runs logs", "report --privacy"
RESUME, TRAIN, FAILED_FROM = "train --resume latest", "train", "clean --failed-from .csdctl/failed.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    project = ProjectDirectory(root)
    for name, text in {"job.yaml": JOB, "model.py": "def build():\n    pass\n"}.items():
        (root / name).write_text(text)
    (root / "data").mkdir()
    (root / "fleet.yaml").write_text("nodes: [{name: csd0, address: 127.0.0.1, port: 9}]\n")
    for run_id in (OLD, NEW, NEW):
        ledger = Ledger(project.ledger, "train")
        ledger.run = run_id
        ledger.save({("host", "csd0", "gradient"): 5})
    for run_id, events in ((OLD, [END, BEST, *DONE]), (NEW, [END, PROGRESS])):
        run = project.new_run()
        run = type(run)(run.path.rename(project.runs / run_id))
        run.save_manifest(manifest_of(NODES))
        run.spec.write_text(to_json(spec_of(NODES, run_id=run_id)))
        write_events(run, events, 1_700_000_000)
        run.rank_log(0).write_text("a line\n")
        run.power.write_text("")
        for model in (run.model, run.best_model):
            with zipfile.ZipFile(model, "w") as archive:
                archive.writestr("model.weights.h5", b"weights")
                archive.comment = describe_model(run_id, END.weights_hash).encode()
        state = {"state": "stopped", "error": "interrupted"} if run_id == NEW else {}
        save_json(
            run.process,
            {"run": run_id}
            | describe_holder("train", root)
            | {"ended": "2026-01-02", EVENT_BYTES: run.events.stat().st_size, NUM_KILLED: 0}
            | state,
        )
    save_json(project.failed, {"schema": "csdctl.failed/1", "command": "exec", "failed": {"csd0": {}}})
    save_plan(project.plan("job"), Plan.model_validate(manifest_of(NODES)["plan"]))
    return root


@pytest.fixture
def project(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectDirectory:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / ".csdctl").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    return ProjectDirectory(tmp_path)


def put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what puts something else in the place of a file or directory."""

    def damage(path: Path) -> None:
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
        make(path)

    return damage


def change_text(before: str, after: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(before, after))


def replace_text(before: str, after: str) -> Callable[[Path], None]:
    """Return what replaces text as csdctl would have written it, with the right checksum if there is one."""

    def damage(path: Path) -> None:
        document = remove_check(path.read_bytes().removesuffix(b"\n"))
        changed = document.replace(before.encode(), after.encode())
        path.write_bytes(add_check(changed)[0] if path.suffix == ".json" else changed)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut at its end": lambda path: os.truncate(path, path.stat().st_size - 3),
    "empty": lambda path: path.write_bytes(b""),
    "NULs": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "a list": lambda path: path.write_text("[1]"),
    "an object": lambda path: path.write_text('{"a": {"b": []}}'),
    "a terabyte": lambda path: os.truncate(path, 1 << 40),
    "a directory": put(Path.mkdir),
    "a pipe": put(os.mkfifo),
    "a file": put(Path.touch),
    "a dangling link": put(lambda path: path.symlink_to("/missing/place")),
    "a link to itself": put(lambda path: path.symlink_to(path.name)),
    "missing": put(lambda path: None),
    "with an unknown node": replace_text("csd0", "csd9"),
    "with a name in Latin-1": lambda path: os.mkdir(os.fsencode(path) + b"/2026\xff"),
    "newer": replace_text('"schema": 1', '"schema": 9'),
    "newer spec": replace_text('"schema":2', '"schema":9'),
    "newer plan": replace_text("schema_version: 1", "schema_version: 9"),
    "of the future": replace_text('"time":17', '"time":97'),
    "unknown events": replace_text('"event":"EpochEnd"', '"event":"Epochs"'),
    "of another run": lambda path: shutil.copy(str(path).replace(NEW, OLD), path),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes().replace(b"weights", b"weightr")),
    "of other weights": lambda path: path.write_bytes(path.read_bytes().replace(b"hash", b"hush")),
    "a model of another run": lambda path: shutil.copy(str(path).replace(OLD, NEW), path),
    "a digit more": replace_text('"num_bytes":5', '"num_bytes":50'),
    "another value": change_text('"batch_size": ', '"batch_size": 1'),
    "older": lambda path: path.write_text(path.read_text().partition("\n")[0] + "\n"),
    "a line less at its end": lambda path: path.write_text("".join(path.read_text().splitlines(True)[:-1])),
    "a line less": lambda path: path.write_text(path.read_text().partition("\n")[2]),
    "pid of nobody": replace_text('"ended"', '"began"'),
    "pid as text": replace_text('"pid": ', '"pid": "1", "p": '),
}
UNREADABLE = ("NULs", "bytes", "a directory", "a pipe", "cut", "empty", "a list")
LINKS = ("a dangling link", "a link to itself")
MANIFEST, EVENTS, SPEC, PROCESS = (
    f"runs/{NEW}/{name}" for name in ("manifest.json", "events.jsonl", "spec.json", "process.json")
)
SKIPPED, UPDATE = f"warning: {NEW} is skipped: ", "update this csdctl"
COMPLETED, STOPPED = "completed", "stopped"
OFF = (4, "no node of fleet.yaml can be reached")
"""What a command comes to that has found nothing wrong."""
CASES: list[tuple[str, tuple[str, ...], dict[str, tuple[int, str]]]] = [
    # What is damaged, how, and by command the exit code and what is said. "{}" is the path.
    (
        MANIFEST,
        (*UNREADABLE, *LINKS, "a terabyte", "an object", "missing"),
        dict.fromkeys((LIST, REPORT, LOGS, PRIVACY), (0, SKIPPED)) | {RESUME: (4, SKIPPED)},
    ),
    (MANIFEST, ("another value",), dict.fromkeys((LIST, REPORT), (0, f"{SKIPPED}{{}} was changed"))),
    (MANIFEST, ("of another run",), {LIST: (0, SKIPPED), REPORT: (0, SKIPPED), RESUME: (4, SKIPPED)}),
    (MANIFEST, ("newer",), {LIST: (0, f"{SKIPPED}{{}} was written by a newer csdctl"), REPORT: (0, UPDATE)}),
    (EVENTS, ("a directory", "a pipe", "a terabyte"), {LIST: (0, SKIPPED), REPORT: (2, "cannot read {}")}),
    (EVENTS, ("a dangling link", "a link to itself"), {LIST: (0, SKIPPED), REPORT: (0, SKIPPED)}),
    (
        EVENTS,
        ("NULs", "bytes", "cut at its end", "unknown events"),
        {LIST: (0, STOPPED), REPORT: (0, EVENTS)},
    ),
    (EVENTS, ("missing",), {LIST: (0, STOPPED), REPORT: (2, "{} does not exist")}),
    (EVENTS, ("empty",), {LIST: (0, STOPPED), REPORT: (0, "no complete epoch")}),
    (
        EVENTS,
        ("of the future", "of another run", "a line less", "older"),
        {LIST: (0, STOPPED), REPORT: (0, "of another run: figures"), PRIVACY: (0, "of another run: figures")},
    ),
    (f"runs/{OLD}/events.jsonl", ("empty", "NULs"), {LIST: (0, "events lost")}),
    *(
        (f"runs/{OLD}/{name}", damages, {f"report {OLD}": said})
        for name in ("model.keras", "best.keras")
        for damages, said in (
            (
                (*UNREADABLE, "a flipped bit", "missing", "of other weights", "a model of another run"),
                (0, f"{name} is missing, unreadable or replaced"),
            ),
            (LINKS, (2, "{} is a symbolic link")),
        )
    ),
    (SPEC, (*UNREADABLE, "a terabyte", "missing"), {LIST: (0, STOPPED), RESUME: (4, SKIPPED)}),
    (SPEC, ("of another run",), {LIST: (0, f"{SKIPPED}{{}} is of run {OLD}")}),
    (SPEC, LINKS, {LIST: (0, SKIPPED), RESUME: (4, SKIPPED)}),
    (SPEC, ("newer spec",), {RESUME: (4, f"{SKIPPED}{{}} was written by a newer csdctl")}),
    (PROCESS, (*UNREADABLE, "a terabyte", "missing"), {LIST: (0, "interrupted")}),
    (PROCESS, ("of another run",), {LIST: (0, "interrupted"), REPORT: (0, "interrupted")}),
    (PROCESS, ("pid of nobody", "pid as text"), {LIST: (0, STOPPED), f"runs rm {NEW} --yes": (0, "removed")}),
    (f"runs/{NEW}/logs", ("missing",), {LIST: (0, STOPPED), LOGS: (0, "has no logs yet")}),
    (f"runs/{NEW}/logs", ("a file",), {LIST: (0, STOPPED), LOGS: (2, "{}, where csdctl keeps its files")}),
    (
        f"runs/{NEW}/power.jsonl",
        ("a directory", "a pipe"),
        {LIST: (0, STOPPED), REPORT: (0, "cannot read {}")},
    ),
    (f"runs/{NEW}", ("a file", "missing"), {LIST: (0, COMPLETED), REPORT: (0, COMPLETED)}),
    ("runs", ("a file", "a dangling link"), dict.fromkeys((LIST, REPORT, LOGS, RESUME), (2, "{}, where"))),
    ("runs", ("missing",), {LIST: (0, "no runs yet"), REPORT: (2, "no runs in {}")}),
    ("", ("a file", "a dangling link"), dict.fromkeys((LIST, REPORT, TRAIN), (2, ".csdctl, where"))),
    ("ledger.jsonl", ("a line less at its end", "empty"), {PRIVACY: (0, "{}: lines are lost, repeated")}),
    ("ledger.jsonl", ("missing", "empty"), {PRIVACY: (0, f"{{}} lacks bytes of 2 runs, the latest {NEW}")}),
    ("ledger.jsonl", ("a line less", "a digit more"), {PRIVACY: (0, "{}: lines are lost, repeated")}),
    ("ledger.jsonl", ("cut", "cut at its end", "NULs", "bytes"), {PRIVACY: (0, "{}: lines that cannot be")}),
    (
        "ledger.jsonl",
        ("a directory", "a pipe", "a terabyte"),
        {PRIVACY: (0, "cannot read {}"), LIST: (0, "")},
    ),
    ("plans/job.yaml", (*UNREADABLE, *LINKS, "missing"), {TRAIN: (2, "{}")}),
    ("plans/job.yaml", ("newer plan",), {TRAIN: (2, "{} was written by a newer csdctl")}),
    ("plans", ("a file",), {TRAIN: (2, "plans/job.yaml: not a directory")}),
    ("failed.json", (*UNREADABLE, "an object"), {FAILED_FROM: (2, "failed.json")}),
    ("failed.json", ("with an unknown node",), {FAILED_FROM: (2, "failed.json lists csd9, which")}),
    (f"runs/{NEW}/logs/rank-0.log", ("a directory", "a pipe"), {LOGS: (0, "{} is not a file")}),
    ("runs", ("with a name in Latin-1",), dict.fromkeys((LIST, REPORT), (0, r"csdctl runs rm $'2026\xff'"))),
]


def say(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run csdctl. Return the exit code and, in one line, all that it prints."""
    code = run_command(command.split(), Streams())
    return code, " ".join(" ".join(capfd.readouterr()).split())


@pytest.mark.parametrize(
    ("file", "damage", "command", "expected"),
    [
        pytest.param(file, damage, command, expected, id=f"{file or '.csdctl'} {damage}: {command}")
        for file, damages, commands in CASES
        for damage in damages
        for command, expected in commands.items()
    ],
)
def test_damaged_file_is_named_with_what_to_do_or_is_not_needed(
    project: ProjectDirectory,
    capfd: pytest.CaptureFixture[str],
    file: str,
    damage: str,
    command: str,
    expected: tuple[int, str],
) -> None:
    path = project.state / file
    DAMAGES[damage](path)
    code, said = say(command, capfd)
    assert (code, "this is a bug" in said) == (expected[0], False), said
    assert expected[1].format(path) in said
    if expected[0] or SKIPPED in said:
        assert "→" in said or any(
            remedy in said
            for remedy in ("(mend it, or remove the run: csdctl runs rm ", f"({UPDATE})", f"({NO_LINK})")
        )


def test_best_model_is_not_called_replaced_where_its_epoch_is_lost_from_the_log(
    project: ProjectDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    run = project.find_run(OLD)
    later = replace(END, epoch=3, validation_loss=0.1, weights_hash="better")
    run.events.unlink()
    write_events(run, [END, BEST, later, replace(BEST, epoch=4), *DONE], 1_700_000_000)
    with zipfile.ZipFile(run.best_model, "w") as archive:
        archive.comment = describe_model(OLD, later.weights_hash).encode()
    save_json(run.process, {EVENT_BYTES: run.events.stat().st_size, NUM_KILLED: 0})
    assert "best.keras is missing" not in say(f"report {OLD}", capfd)[1]
    run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:2]))
    said = say(f"report {OLD}", capfd)[1]
    assert ("best.keras is missing" in said, "lines are lost" in said) == (False, True)
    for process in ({EVENT_BYTES: 0}, {EVENT_BYTES: run.events.stat().st_size, NUM_KILLED: 1}):
        save_json(run.process, process)
        assert "is missing" not in say(f"report {OLD}", capfd)[1]
    assert f"lacks bytes of 1 run, the latest {OLD}" in say(PRIVACY, capfd)[1]


@pytest.mark.parametrize("command", [LIST, REPORT, LOGS, PRIVACY, RESUME, FAILED_FROM])
def test_whole_project_has_nothing_to_name(
    project: ProjectDirectory, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    code, said = say(command, capfd)
    assert code == (0 if command in (LIST, REPORT, LOGS, PRIVACY) else 4), said
    assert "warning" not in said
