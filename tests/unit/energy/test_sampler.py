"""The sampler over a real session: a shell loop that reads files, and what it writes."""

import pytest

from csdctl.energy import sampler
from csdctl.energy.sampler import PowerSampler
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Fleet, Host, Node, PowerSource
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import read_power
from csdctl.transport.local import LocalSession
from tests.patience import eventually


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def sample(run, power, said, until):
    """Sample the host's power until the condition `until` holds."""
    session = LocalSession("host", run.path)
    with PowerSampler(run, Fleet((), Host(power=power)), {"host": session}, said):
        assert eventually(until)
    session.close()
    return list(read_power(run))


def command(line, **settings):
    return PowerSource(source="command", command=line, **settings)


class TestSampler:
    def test_source_that_failed_is_read_again(self, run, monkeypatch):
        """As a management controller that is busy: the file is there from the first failure on."""
        monkeypatch.setattr(sampler, "RETRY_S", 0.05)
        said, sensor, count = [], run.path / "watts", run.path / "count"

        def say(line):
            said.append(line)
            if "cannot be read" in line:
                sensor.write_text("3.75\n")

        line = "cat watts && echo >>count"
        records = sample(run, command(line), say, lambda: count.exists() and count.stat().st_size > 2)
        assert "received 'cat: watts: No such file or directory (exit code 1)'" in said[0]
        assert said[1:] == [f"  on host: {line}"]
        failed, *read = records
        assert "No such file" in failed.error
        assert failed.joules is None
        assert read
        assert all(record.joules for record in read)

    def test_source_that_prints_nothing_is_reported(self, run, monkeypatch):
        monkeypatch.setattr(sampler, "MAX_GAP_S", 0.5)
        said = []
        (record,) = sample(run, command("sleep 3000"), said.append, lambda: said)
        assert said[0] == "host: power cannot be read (command): no reading for 0.5 s"
        assert (record.seconds, record.joules) == (0.0, None)

    def test_power_is_read_every_second_in_a_loop_there(self, run):
        line, count = "echo 3750000 uW; echo 3.75; echo >>count", run.path / "count"
        records = sample(
            run, command(line, idle_watts=2.0), print, lambda: count.exists() and count.stat().st_size > 2
        )
        assert sum(r.joules for r in records) == pytest.approx(
            7.5 * sum(r.seconds for r in records), rel=1e-3
        )
        assert {(r.origin, r.idle_watts, r.source) for r in records} == {("measured", 2.0, "command")}

    def test_command_on_the_host_gets_the_name_of_the_machine(self, run, tmp_path):
        (tmp_path / "plug-csd0").write_text("12.5 W\n")
        node = Node("csd0", "10.0.0.1", power=command("cat plug-$machine", on_host=True))
        sessions = {"host": LocalSession("host", tmp_path), "csd0": LocalSession("csd0", run.path)}
        with PowerSampler(run, Fleet((node,)), sessions, print):
            assert eventually(lambda: list(read_power(run)))
        record = next(read_power(run))
        assert (record.machine, record.joules) == ("csd0", pytest.approx(12.5 * record.seconds, rel=1e-3))

    def test_constant_is_stated_and_never_measured(self, run):
        (record,) = sample(run, PowerSource(source="constant", watts=10.0), print, lambda: True)
        assert record.origin == "stated"
        assert record.joules == pytest.approx(10 * record.seconds, rel=0.1, abs=0.01)


class TestFleetFile:
    def test_power_of_host_and_nodes_is_read_and_written(self, tmp_path):
        path = tmp_path / "fleet.yaml"
        path.write_text(
            "host: {power: {source: command, command: 'cat a | tail', idle_watts: 0, includes_nodes: true}}\n"
            "defaults: {power: 7.5 W}\nnodes:\n"
            "  - {name: 'csd[0-1]', address: '10.0.0.[1-2]'}\n"
            "  - {name: board, address: 10.0.0.9, power: rapl}\n"
        )
        fleet = load_fleet(path)
        assert fleet.host.power == command("cat a | tail", idle_watts=0.0, includes_nodes=True)
        assert [node.power for node in fleet.nodes] == [
            PowerSource(source="constant", watts=7.5),
            PowerSource(source="constant", watts=7.5),
            PowerSource(source="rapl"),
        ]

    @pytest.mark.parametrize(
        ("power", "said"),
        [
            ("command", "source command needs `command`, and no other source uses it"),
            ("ipmi", "source ipmi no longer exists: write `source: command`, with a `command` from"),
            ("{source: rapl, watts: 0}", "source constant needs `watts`, and no other source uses it"),
            ("{source: rapl, on_host: true}", "only source command uses `on_host`"),
            ("-3", "watts"),
            ("wind", "must be 'rapl', 'constant' or 'command'"),
        ],
    )
    def test_source_that_cannot_be_is_refused(self, tmp_path, power, said):
        path = tmp_path / "fleet.yaml"
        path.write_text(f"nodes:\n  - {{name: a, address: 10.0.0.1, power: {power}}}\n")
        with pytest.raises(InputError, match=said):
            load_fleet(path)
