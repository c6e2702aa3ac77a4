"""The output of `discover`, with and without a terminal and as JSON, and its options."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, HostKeyError, UnreachableError
from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Fleet, Node
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.fleet import discover_document, render_fleet
from csdctl.terminal.nodes import MAX_LINES, CountView
from csdctl.terminal.streams import format_json
from csdctl.workflows.discovery.discover import DiscoverResult
from tests.emulated.running import csdctl
from tests.json_page import check_document

CSD = Facts(
    "csd",
    architecture="aarch64",
    cpu_model="Cortex-A53",
    num_cores=4,
    memory_bytes=6 << 30,
    python_version="3.11.9",
    tensorflow_version="2.21.0",
    mpi_version="5.0.11",
)
HOST = replace(CSD, name="host", cpu_model="AMD EPYC", drives=(Drive("/dev/nvme4", "S4", "CSD 32TB"),))


def result_of(*machines: Facts, failed: dict[str, CsdctlError] | None = None) -> DiscoverResult:
    facts = {machine.name: machine for machine in (HOST, *machines)}
    nodes = tuple(Node(name, f"10.0.0.{number}") for number, name in enumerate(facts) if name != "host")
    return DiscoverResult(Fleet(nodes), facts, failed or {}, (), Path("fleet.facts.json"))


def shown(result: DiscoverResult, *, verbose: bool = False) -> str:
    file = StringIO()
    render_fleet(PrintableConsole(file=file, width=100), result, verbose=verbose)
    return file.getvalue()


def csds(number: int, **changes: object) -> list[Facts]:
    return [replace(CSD, name=f"csd{k}", **changes) for k in range(number)]  # type: ignore[arg-type]


class TestTable:
    def test_equal_nodes_share_a_row_and_differing_nodes_stand_out(self) -> None:
        text = shown(result_of(*csds(32), replace(CSD, name="csd32", tensorflow_version="2.20.0")))
        assert "csd[0-31] (32)" in text
        assert "differs: csd32: TensorFlow 2.20.0 instead of 2.21.0" in text
        verbose = shown(result_of(*csds(3)), verbose=True)
        assert all(f"csd{k} " in verbose for k in range(3))

    def test_table_fits_80_columns_with_names_and_numbers_whole(self) -> None:
        file = StringIO()
        sizes = {"memory_bytes": 128 << 30, "disk_free_bytes": 900 << 30}
        machines = csds(100, **sizes, tensorflow_version=None, mpi_version=None)
        render_fleet(PrintableConsole(file=file, width=80), result_of(*machines), verbose=False)
        (row,) = (line for line in file.getvalue().splitlines() if "csd[0-99] (100)" in line)
        assert "128 GiB  900 GiB  3.11.9  missing  missing" in row

    def test_drive_that_is_a_node_is_named_and_notes_are_folded(self) -> None:
        node = replace(CSD, name="csd9", drives=(Drive("/dev/nvme0", "S4", "CSD 32TB"),))
        text = shown(result_of(*csds(9, notes=("Python unknown",)), node))
        assert "drive: csd9 is /dev/nvme4 (CSD 32TB, serial S4)" in text
        assert "note: csd[0-8]: Python unknown" in text

    def test_thousand_nodes_fit_a_screen(self) -> None:
        machines = [
            replace(machine, problem=None if k % 3 else "gone", notes=(f"clock {k}",))
            for k, machine in enumerate(csds(1000))
        ]
        failed: dict[str, CsdctlError] = {
            machine.name: HostKeyError(f"shows key {machine.name}") for machine in machines if machine.problem
        }
        text = shown(replace(result_of(*machines), failed=failed))
        assert len(text.splitlines()) < 2 * MAX_LINES + 60
        assert f"… and {334 - MAX_LINES} more problems; --json lists them all" in text


def test_document_has_groups_problems_and_drives_beside_the_machines() -> None:
    lost = [Facts(f"csd{k}", problem="closed") for k in (3, 4)]
    failed: dict[str, CsdctlError] = {
        machine.name: UnreachableError(f"10.0.0.{k} is closed", remedy="start it")
        for k, machine in zip((4, 5), lost, strict=True)
    }
    document = json.loads(format_json(discover_document(result_of(*csds(3), *lost, failed=failed))))
    check_document(document)
    assert len(document["machines"]) == 6
    assert document["groups"][1]["ranges"] == ["csd[0-2]"]
    assert document["problems"] == [
        {"names": ["csd3", "csd4"], "message": "10.0.0.4, 10.0.0.5 is closed", "remedy": "start it"}
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_machines_are_lines_or_a_bar_that_counts(is_terminal: bool) -> None:
    file = StringIO()
    console = PrintableConsole(file=file, width=100, force_terminal=is_terminal)
    with CountView(console, "probing", 3) as view:
        view.take(replace(CSD, name="csd0"))
        view.take(Facts("csd1", problem="port 22 is closed"))
    if is_terminal:
        assert "2/3" in file.getvalue()
        assert "1 failed" in file.getvalue()
    else:
        assert file.getvalue() == "csd0: aarch64 Cortex-A53, 4 cores, 6 GiB\ncsd1: port 22 is closed\n"


class TestSources:
    def test_dry_run_prints_the_file_and_writes_nothing(self, tmp_path: Path) -> None:
        variables = {"ansible_host": "127.0.0.1", "ansible_user": "me"}
        hosts = {f"csd{number}": variables for number in range(4)}
        content = {"_meta": {"hostvars": hosts}, "csds": {"hosts": list(hosts)}}
        (tmp_path / "hosts").write_text(json.dumps(content))
        ended = csdctl(tmp_path, "discover", "--inventory", "hosts", "--dry-run", "--limit", "csd[1-2]")
        assert ended.returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
        (tmp_path / "fleet.yaml").write_text(ended.stdout)
        assert [node.name for node in load_fleet(tmp_path / "fleet.yaml").nodes] == ["csd1", "csd2"]
        again = csdctl(tmp_path, "discover", "--inventory", "hosts", "--dry-run", "--json", "--force")
        assert [node["user"] for node in json.loads(again.stdout)["nodes"]] == ["me"] * 4

    def test_inventory_is_printed_in_each_format(self, tmp_path: Path) -> None:
        (tmp_path / "fleet.yaml").write_text("nodes: [{name: 'csd[0-1]', address: '10.0.0.[1-2]'}]")
        document = json.loads(csdctl(tmp_path, "inventory", "--format", "json").stdout)
        assert [node["address"] for node in document["nodes"]] == ["10.0.0.1", "10.0.0.2"]
        assert "ansible_host: 10.0.0.2" in csdctl(tmp_path, "inventory", "--limit", "csd1").stdout
        ended = csdctl(tmp_path, "inventory", "--format", "ssh-config", "--output", "nodes.conf")
        assert ended.stdout == "2 nodes: nodes.conf written\n"
        assert "HostName 10.0.0.1\n" in (tmp_path / "nodes.conf").read_text()
