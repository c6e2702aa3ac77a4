"""FAULTS 25–33: trees deployed to nodes with faulty disks, links and clocks."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project
from tests.patience import communicate, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.first(1)]

MIB = 1 << 20
SLOW_MBIT_PER_S = 10
SLOW_BYTES = 16 * MIB
"""Takes 13 s: three quarters of it are on their way, for 10 s, when a quarter has arrived."""


def write_tree(project: Project, **files: bytes) -> Path:
    source = project.path / "tree"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    return source


def deploy(project: Project, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run `csdctl deploy --tree tree:there`; return exit code and the result of each node."""
    done = project.csdctl("deploy", "--tree", "tree:there", "--json", *options)
    document = json.loads(done.stdout) if done.stdout else {}
    return done, document.get("machines", {})


def deployed(node: LabNode) -> dict[str, bytes]:
    place = node.home / "there"
    if place.is_symlink():
        place = node.root / os.readlink(place).lstrip("/")
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@contextmanager
def slow_link_to(lab: Lab, node: LabNode) -> Iterator[None]:
    port = f"p-{node.name}"
    network.limit_bandwidth(lab.host.namespace, port, SLOW_MBIT_PER_S)
    try:
        yield
    finally:
        network.clear_link(lab.host.namespace, port)


def wait_until_most_arrived(node: LabNode, process: subprocess.Popen[str]) -> None:
    def num_bytes() -> int:
        sizes = 0
        for path in (node.home / ".csdctl").rglob("*"):
            try:
                sizes += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
        return sizes

    wait_for(lambda: num_bytes() > SLOW_BYTES * 3 // 4, process)


@pytest.mark.fault(25)
def test_full_disk_is_reported_and_the_old_tree_stays(project: Project) -> None:
    with project.lab.node("tiny", 60, home="tiny") as node:
        project.use(node)
        write_tree(project, first=b"old")
        assert deploy(project)[0].returncode == 0
        write_tree(project, first=b"new", second=os.urandom(3 * MIB))
        done, _ = deploy(project)
        assert done.returncode == 1, done.stderr
        assert "tiny: " in done.stderr
        assert "No space left" in done.stderr
        assert deployed(node) == {"first": b"old"}
        assert sum(path.stat().st_size for path in node.home.rglob("*.part*")) < MIB


@pytest.mark.fault(26)
def test_read_only_home_is_reported_and_other_nodes_continue(project: Project) -> None:
    well = project.lab.near[0]
    with project.lab.node("frozen", 61, home="read-only") as node:
        project.use(well, node)
        write_tree(project, first=b"1")
        done, _ = deploy(project)
        assert done.returncode == 3, done.stderr
        assert "frozen: " in done.stderr
        assert "Read-only file system" in done.stderr
        assert deployed(well) == {"first": b"1"}
        assert deployed(node) == {}


@pytest.mark.fault(27)
@pytest.mark.fault(20)
def test_power_cut_leaves_no_partial_file_and_the_rest_is_sent_later(project: Project) -> None:
    node = project.lab.near[0]
    project.use(node)
    contents = {f"file{number}": os.urandom(SLOW_BYTES // 8) for number in range(8)}
    write_tree(project, **contents)
    with slow_link_to(project.lab, node):
        process = project.start("deploy", "--tree", "tree:there")
        wait_until_most_arrived(node, process)
        with node.switched_off():
            output = "".join(communicate(process, project.path))
    assert process.returncode == 4, output
    assert "csd0: " in output
    assert "Traceback" not in output
    assert deployed(node) == {}
    done, nodes = deploy(project)
    assert done.returncode == 0, done.stderr
    assert nodes["csd0"]["bytes_sent"] < SLOW_BYTES
    assert deployed(node) == contents


@pytest.mark.thorough
@pytest.mark.fault(30)
@pytest.mark.fault(32)
@pytest.mark.fault(33)
def test_odd_names_and_ten_thousand_files_on_a_node_whose_clock_is_a_day_off(project: Project) -> None:
    names = ["a b", "semi;colon", "$(touch owned)", "new\nline", "-rf", "quote'", "back\\slash", "`id`"]
    with project.lab.node("late", 62, clock="-1d") as node:
        project.use(node)
        source = write_tree(project, **{name: name.encode() for name in names})
        for number in range(10_000):
            (source / f"{number:05}").write_bytes(b"%d" % number)
        done, nodes = deploy(project)
        assert done.returncode == 0, done.stderr
        assert nodes["late"]["num_sent"] == 10_000 + len(names)
        files = deployed(node)
        assert len(files) == 10_000 + len(names)
        assert {name: files[name] for name in names} == {name: name.encode() for name in names}
        assert not list(node.home.rglob("owned"))
        done, nodes = deploy(project)
        assert (nodes["late"]["num_sent"], nodes["late"]["bytes_sent"]) == (0, 0)
        _, machines, _ = project.discover()
        assert machines["late"]["clock_offset_s"] == pytest.approx(-86_400, abs=600)
