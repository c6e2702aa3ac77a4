"""Every command line of README.md and docs/ runs to its end as it stands, in what its page describes.

`PAGES` says what that is, and `NOT_RUN` which lines a test cannot run. A new line of a page in `PAGES` runs
without a change here. Any other new line fails.
"""

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csdctl.fleet.fleet_file import load_fleet
from tests.emulated.running import CSDCTL, csdctl, emulated, succeed
from tests.emulated.small_jobs import ALL_DATA, dense_model, frozen_model, save_arrays, small_job
from tests.needs import SYSTEM_PATH, require
from tests.patience import run_command

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[2]
PAGES_OF_DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {
    str(page.relative_to(ROOT)): page.read_text() for page in PAGES_OF_DOCS if page.parent.name != "decisions"
}
IN_A_LAB = {
    "docs/tutorials/nvme-list-to-a-report.md",
    "docs/how-to/add-a-node.md",
    "docs/how-to/train-on-several-servers.md",
}
"""Pages whose commands need machines of their own: tests/lab has tests of them."""
PLACEHOLDER = re.compile(r"\b(?:[A-Z]|FILE|ID|NODE|RUN|SOURCE)\b|…")


def list_blocks(text: str) -> list[str]:
    """Return the command lines of the console blocks of a page, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = re.findall(r"^ *\$ ((?:.*\\\n)*.*)$", "\n".join(blocks), re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def list_spans(text: str) -> list[str]:
    """Return the whole command lines of csdctl in the text between the blocks of a page."""
    lines = re.findall(r"`(csdctl [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for line in lines if not PLACEHOLDER.search(line)]


LINES = {name: list_blocks(text) for name, text in TEXTS.items()}
IN_BLOCKS = {line for lines in LINES.values() for line in lines}
IN_TEXT = {line: None for text in TEXTS.values() for line in list_spans(text) if line not in IN_BLOCKS}
# What stops the fleet comes last.
TEXT = "text between blocks"
LINES[TEXT] = sorted(IN_TEXT, key=lambda line: line.startswith("csdctl emulate"))


def block_of(page: str, file: str) -> str:
    """Return the content of a file that a page shows."""
    return str(re.findall(rf"```\w+\n(# {re.escape(file)}\n.*?)```", TEXTS[page], re.DOTALL)[0])


NOT_RUN = {
    r"make demo.*|csdctl demo": "test_demo.py runs `csdctl demo`",
    r"make test": "runs this test",
    r"pip .*|python3 -m venv .*|/opt/csdctl/venv/bin/pip .*": "downloads software from a package index",
    r"csdctl provision(?! --(collect|with-keras)).*|ansible-playbook .* ansible/.*": (
        "installs software on bare nodes: tests/provision"
    ),
    r"jupyter lab .*": "needs a browser; test_notebook.py runs the notebook",
    r"sudo nvme list": "needs NVMe devices",
    r"sudo mkdir .*|csdctl exec .* apt-get .*": "changes this machine",
    r"(rsync|scp|ssh-copy-id|ssh csd1) .*": "needs a machine of the reader's",
    r"csdctl exec --task tasks.py:restart_daemon .*": "needs systemd; tests/lab/test_exec.py runs tasks",
    r"csdctl train --resume latest --exclude storage1|csdctl clean --kill --exclude storage1": (
        "runs on another server, after this one is lost: tests/lab/test_rack.py"
    ),
    r"csdctl init train.py -- .*": "needs a script with options: tests/unit/workflows/init",
    r"csdctl verify --strategy features": "needs a frozen model: test_strategies.py",
    r"csdctl train csdctl-job/job.yaml": "trains what `Job.from_model` has written: test_notebook.py",
    r"csdctl emulate up( --nodes 2 --cpu 0.4 --memory 4G| --nodes 3 --cpu 0.25)?": (
        "the fleet of the test is up: test_emulate.py"
    ),
}
"""Lines that a test cannot run, as regular expressions, and why."""
INCOMPLETE = re.compile(r"error: (?:option '[\w-]+' requires an argument|missing |no command to run)")
"""What csdctl says of a command that the text only names."""


def can_run(line: str) -> bool:
    return not any(re.fullmatch(pattern, line, re.DOTALL) for pattern in NOT_RUN)


def write_npz(path: Path, *shape: int, count: int = 300) -> None:
    generator = np.random.default_rng(count)
    images = generator.integers(0, 256, (count, *(shape or (8, 8, 1))), dtype=np.uint8)
    np.savez(path, x=images, y=np.arange(count) % 3)


def small(directory: Path, model: str = dense_model(8, 8, 1), *shape: int) -> None:
    """Write a job of a few weights, with data on the host and on each emulated node."""
    recipe = "epochs: 3, learning_rate: 0.05, reference_batch: 64"
    (directory / "job.yaml").write_text(small_job(recipe, ".npz", data=ALL_DATA))
    (directory / "model.py").write_text(model)
    homes = (home / "private.npz" for home in directory.glob(".csdctl/emulated/nodes/*/home"))
    for path in (directory / "public.npz", directory / "validation.npz", *homes):
        write_npz(path, *shape)


def write_example_of_init(directory: Path) -> None:
    """Write scripts, models and data as `csdctl init` reads them."""
    page = "docs/how-to/from-model-fit.md"
    for file in ("train.py", "data.py"):
        (directory / file).write_text(block_of(page, file))
    (directory / "model.py").write_text(dense_model(32, 32, 3, activation="linear"))
    write_npz(directory / "all.npz", 32, 32, 3)
    for number, name in itertools.product(range(40), ("train/cat", "train/dog", "train/horse")):
        for path in (name, name.replace("train", "val")):
            (directory / "data" / path).mkdir(parents=True, exist_ok=True)
            colours = np.random.default_rng(number).integers(0, 256, (24, 28, 3), np.uint8)
            Image.fromarray(colours).save(directory / "data" / path / f"{number}.png")


def write_own_model(directory: Path) -> None:
    (directory / "my_model.py").write_text(block_of("docs/how-to/bring-your-own-model.md", "my_model.py"))
    save_arrays(directory / "train", 300, 28, 28, 1, num_classes=10)


def write_frozen_model(directory: Path) -> None:
    small(directory, frozen_model(8, "Conv2D(4, 3)"), 8, 8, 3)


def write_model_to_split(directory: Path) -> None:
    small(directory, frozen_model(8, "Conv2D(4, 3, name='block_6_project_BN')", "Conv2D(4, 3)"), 8, 8, 3)
    job = (directory / "job.yaml").read_text().replace("model.py:build", "model.py:build_trained")
    (directory / "job.yaml").write_text(job.replace("~/private.npz", "~/private.npz, activations: may-leave"))


def make_demo(directory: Path) -> None:
    """Leave a run and the fleet's files in demo, as `make demo` does, beside the environment of csdctl."""
    (directory / ".venv").symlink_to(sys.prefix)
    demo = directory / "demo"
    demo.mkdir()
    succeed(demo, "emulate", "up", "--nodes", "3", "--cpu", "0.25")
    small(demo)
    succeed(demo, "train", "--batch-size", "32", "--skip-doctor")
    succeed(demo, "emulate", "down", "--keep")


def write_inventories(directory: Path) -> None:
    """Write the fleet as Ansible and OpenSSH have it, and a playbook."""
    hosts, aliases = "[csds]\n", ""
    for node in load_fleet(directory / "fleet.yaml").nodes:
        place = f"ansible_host={node.address} ansible_port={node.port} ansible_user={node.user}"
        hosts += f"{node.name} {place} ansible_ssh_private_key_file={node.key}\n"
        place = f"HostName {node.address}\nPort {node.port}\nUser {node.user}"
        aliases += f"Host {node.name}\n{place}\nIdentityFile {node.key}\n"
    (directory / "hosts.ini").write_text(hosts)
    (directory / "home/.ssh/config").write_text(aliases)
    shutil.copy(directory / ".csdctl/emulated/known_hosts", directory / "home/.ssh/known_hosts")
    (directory / "site.yml").write_text("- {hosts: csds, gather_facts: false, tasks: [{raw: echo here}]}\n")
    (directory / "fleet.yaml").unlink()


def make_trees(directory: Path) -> None:
    for name in ("wheels", "datasets/public", "tools", "project/docs"):
        (directory / name).mkdir(parents=True)
        (directory / name / "a.pdf").write_text("content")


@dataclass(frozen=True)
class Page:
    """What a page describes."""

    nodes: int | None = None
    """Emulated nodes of a directory of its own; None: a job and four nodes, which such pages share."""
    prepare: Callable[[Path], None] = lambda directory: None
    """Writes files into the directory."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Shell commands for what the page says in words, by the line that follows; '' is for the first."""
    needs: tuple[str, ...] = ()


LONG = "sed -i 's/epochs: 3,/epochs: 60,/' job.yaml; csdctl train --detach --skip-doctor"
SHORT = "sed -i 's/epochs: 60,/epochs: 3,/' job.yaml"
COPY = "cp -r .csdctl/runs/$(ls .csdctl/runs | tail -1) .csdctl/runs/"
LATEST = "$(ls .csdctl/runs | tail -1)"
PAGES = {
    "README.md": Page(),
    "docs/reference/performance.md": Page(),
    "docs/explanation/algorithm-1.md": Page(),
    "docs/how-to/tune-a-job.md": Page(),
    "docs/how-to/ask-before-you-buy.md": Page(),
    "docs/how-to/examine-a-fleet.md": Page(),
    "docs/how-to/prepare-data.md": Page(),
    "docs/how-to/keep-data-private.md": Page(),
    "docs/how-to/run-commands.md": Page(),
    "docs/how-to/read-a-report.md": Page(
        before={"": f"{COPY}20260101-100000-000000; {COPY}20260102-100000-000000"}
    ),
    "docs/how-to/predict.md": Page(
        before={"": f"{COPY}20261122-100000-000000; cp .csdctl/runs/20261122*/model.keras trained.keras"}
    ),
    "docs/how-to/energy.md": Page(),
    "docs/how-to/follow-a-run.md": Page(
        before={"csdctl runs logs ID csd3 -f": f"export ID={LATEST}", "csdctl runs stop": LONG}
    ),
    "docs/how-to/survive-losses.md": Page(before={"": f"{LONG}; csdctl runs stop"}),
    "docs/how-to/run-in-production.md": Page(before={"": SHORT}),
    "docs/how-to/provision.md": Page(needs=("PyPI", "Debian's archive")),
    TEXT: Page(),
    "docs/how-to/keep-a-fleet.md": Page(
        nodes=4,
        before={
            "": "sed -i /emulated:/d fleet.yaml",
            "csdctl clean --failed-from .csdctl/failed.json": "csdctl exec -- false",
        },
    ),
    "docs/how-to/transfer-learning.md": Page(nodes=2, prepare=write_frozen_model),
    "docs/how-to/split.md": Page(nodes=2, prepare=write_model_to_split),
    "docs/how-to/bring-your-own-model.md": Page(nodes=2, prepare=write_own_model),
    "docs/how-to/deploy-trees.md": Page(nodes=8, prepare=make_trees),
    "docs/how-to/use-an-existing-inventory.md": Page(
        nodes=2,
        prepare=write_inventories,
        before={
            "csdctl discover --ssh-config ~/.ssh/config --limit 'csd*'": "rm fleet.yaml",
            "csdctl inventory --format ansible > hosts.yml": (
                "csdctl discover --inventory inventory.json --limit csds --force"
            ),
        },
        needs=("ansible",),
    ),
    "docs/how-to/from-model-fit.md": Page(
        0,
        prepare=write_example_of_init,
        before={
            line: "rm job.yaml" for line in LINES["docs/how-to/from-model-fit.md"] if "init --model" in line
        },
    ),
    "docs/explanation/emulation.md": Page(0),
    "docs/tutorials/first-run.md": Page(0, prepare=make_demo),
    "docs/tutorials/boards-in-a-drawer.md": Page(
        0, before={"csdctl trust": "csdctl emulate up --nodes 4 --cpu 1"}
    ),
}


PROMPTING = re.compile(r"csdctl (?:trust|runs rm|clean --(?:everything|unused|computed|older-than))\b")
ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['sh', '-c', sys.argv[1]])))"
DONE = set[str]()
"""Lines that have run in the directory of the shared fleet."""


def build_script(page: Page, lines: Sequence[str]) -> str:
    """Return a script for bash that runs the lines, and prints a mark before and the exit code after each."""
    script = [page.before.get("", "")]
    for number, line in enumerate(lines):
        called = shlex.quote(re.sub(r"\b(ID|A|B)\b", r"$\1", line))
        call = f"eval {called} </dev/null 2>&1"
        if PROMPTING.match(line):
            call = f"{shlex.join([sys.executable, '-c', ON_TERMINAL])} {called} < <(echo y)"
        script += [page.before.get(line, ""), f"echo @@{number}; {call}; echo @@$?"]
    return "\n".join([*script, ""])


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a user in whose home is a clone of csdctl."""
    (home / ".ssh").mkdir(parents=True, mode=0o700, exist_ok=True)
    if not (home / "csdctl-source").exists():
        (home / "csdctl-source").symlink_to(ROOT)
    dropped = ("CSDCTL_EMULATE", "SSH_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = f"{CSDCTL.parent}:{os.environ['PATH']}:{SYSTEM_PATH}"
    changed = {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "COLUMNS": "200"}
    return {**kept, **changed, "ANSIBLE_SSH_USETTY": "False"}  # emulated nodes have no terminals


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that most pages share."""
    directory = tmp_path_factory.mktemp("fleet")
    with emulated(directory, 4):
        small(directory)
        yield directory


@contextmanager
def opened(page: Page, directory: Path) -> Iterator[Path]:
    """Yield a directory of its own with what the page describes."""
    with emulated(directory, page.nodes) if page.nodes else nullcontext():
        page.prepare(directory)
        try:
            yield directory
        finally:
            for state in directory.glob("**/.csdctl/emulated"):
                csdctl(state.parents[1], "emulate", "down")


@pytest.mark.thorough
@pytest.mark.parametrize("name", PAGES)
def test_command_lines_of_a_page_run_to_their_end(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = PAGES[name]
    require(*page.needs)
    is_shared = page.nodes is None
    done = DONE if is_shared else set()
    lines = [line for line in dict.fromkeys(LINES[name]) if can_run(line) and line not in done]
    place = nullcontext(request.getfixturevalue("fleet")) if is_shared else opened(page, tmp_path)
    with place as directory:
        command = ["bash", "-c", build_script(page, lines)]
        output = run_command(command, cwd=directory, env=environment(directory / "home")).stdout
    done |= {*lines}
    parts = re.findall(r"^@@\d+\n(.*?)^@@(\d+)$", output, re.MULTILINE | re.DOTALL)
    results = dict(zip(lines, ((int(code), text) for text, code in parts), strict=False))
    wrong = [
        f"$ {line}\n{results.get(line, (None, output))[1][-3000:]}\nexit code {results.get(line, [None])[0]}"
        for line in lines
        if line not in results or results[line][0] != 0 or "Traceback" in results[line][1]
        if name != TEXT or not INCOMPLETE.search(results.get(line, (0, ""))[1])
    ]
    assert not wrong, "\n\n".join(wrong)


def test_every_command_line_runs_or_has_a_reason_not_to() -> None:
    pages = {name for name, lines in LINES.items() if any(map(can_run, lines))} - IN_A_LAB
    assert pages == set(PAGES), "a page with command lines needs an entry in PAGES"
    lines = {line for of_page in LINES.values() for line in of_page}
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, line, re.DOTALL) for line in lines), (
            f"no page has {pattern} any more"
        )
    for name, page in PAGES.items():
        assert {*page.before} <= {"", *filter(can_run, LINES[name])}
