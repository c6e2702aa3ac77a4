"""The result of `discover`; host keys that the user accepts and forgets."""

import base64
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import HostKeyError, InputError, UnreachableError
from csdctl.fleet.facts import Facts, facts_path, load_facts, save_facts
from csdctl.fleet.model import Fleet, Node, select_nodes
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.discovery.discover import (
    ShownKey,
    check_forgotten,
    collect_all_facts,
    discover,
    forget_keys,
    keep_named,
    review_keys,
)
from tests.fake_session import FakeSession


def test_unreachable_nodes_are_kept_with_their_problem_and_others_remain_known(tmp_path: Path) -> None:
    fleet = Fleet((Node("csd0", "127.0.0.1", port=1),), path=tmp_path / "fleet.yaml")
    save_facts(fleet, {"csd7": Facts("csd7", num_cores=4), "csd0": Facts("csd0", num_cores=4)})
    done: list[str] = []
    result = discover(fleet, directory=tmp_path, on_done=lambda facts: done.append(facts.name))
    saved = load_facts(fleet)
    assert list(result.facts) == ["host", "csd0"]
    assert isinstance(result.failed["csd0"], UnreachableError)
    assert "refused" in (saved["csd0"].problem or "")
    assert saved["csd0"].num_cores is None
    assert saved["host"].num_cores
    assert saved["csd7"].num_cores == 4
    assert sorted(done) == ["csd0", "host"]


def test_machine_that_cannot_be_probed_has_a_problem_and_one_that_is_lost_is_an_error() -> None:
    fleet = Fleet((Node("csd0", "10.0.0.1"),))
    facts = collect_all_facts(fleet, {"csd0": FakeSession("csd0")})
    assert "probing failed" in (facts["csd0"].problem or "")
    lost = UnreachableError("the connection was lost", node="csd0")
    with pytest.raises(UnreachableError):
        collect_all_facts(fleet, {"csd0": FakeSession("csd0").on("sh", error=lost)})


@pytest.mark.fault(13)
@pytest.mark.fault(15)
def test_machine_that_is_listed_twice_is_a_warning_of_discover(tmp_path: Path) -> None:
    nodes = tuple(Node(f"csd{number}", "127.0.0.1", port=max(1, number)) for number in range(3))
    [warning] = discover(Fleet(nodes, path=tmp_path / "fleet.yaml"), directory=tmp_path).warnings
    assert warning == "csd0, csd1 have the same address 127.0.0.1 port 1: one machine listed twice"


@pytest.mark.fault(36)
@pytest.mark.parametrize("content", ['{"machines": {"csd0"', '{"schema": 0, "machines": {}}', "\xff"])
def test_unreadable_facts_are_set_aside_with_a_warning(tmp_path: Path, content: str) -> None:
    fleet = Fleet((Node("csd0", "127.0.0.1", port=1),), path=tmp_path / "fleet.yaml")
    path = facts_path(fleet)
    path.write_text(content, encoding="latin-1")
    result = discover(fleet, directory=tmp_path)
    aside = path.with_name("fleet.facts.json.bak")
    assert aside.read_text(encoding="latin-1") == content
    assert set(load_facts(fleet)) == {"host", "csd0"}
    assert [warning for warning in result.warnings if str(aside) in warning]


TYPE = "ssh-ed25519"
OUTER = Node("outer", "10.0.0.1")
GATE = Node("gate", "10.0.0.2", 2200, jump=OUTER)
FLEET = Fleet((Node("csd0", "10.9.0.1", jump=GATE), Node("csd1", "10.1.0.1"), Node("csd2", "10.1.0.1", 2222)))


def blob_of(number: int) -> bytes:
    return len(TYPE).to_bytes(4, "big") + TYPE.encode() + bytes([0, 0, 0, 1, number])


class Machines:
    """What the machines present, by name, and who was asked, in order; one without a key is down."""

    def __init__(self) -> None:
        self.keys = {"outer": 1, "gate": 2, "csd0": 3, "csd1": 4, "csd2": 5}
        self.asked: list[str] = []

    def fetch(self, node: Node, jumps: object, *, connect_deadline_s: float) -> tuple[str, bytes]:
        self.asked.append(node.name)
        if node.name not in self.keys:
            raise UnreachableError("is down", node=node.name)
        return TYPE, blob_of(self.keys[node.name])


class Reviewer:
    """Takes note of every layer of keys, and accepts it unless it `refuses`."""

    def __init__(self, project: ProjectDirectory, *, refuses: bool = False, is_dry_run: bool = False) -> None:
        self.refuses = refuses
        self.errors: dict[str, str] = {}
        self.new: list[str] = []
        self.left_out: list[str] = []
        review_keys(FLEET, project, self.show, is_dry_run=is_dry_run)

    def show(self, outcomes: Mapping[str, Any], new: Sequence[ShownKey], closed: Sequence[str]) -> None:
        self.errors |= {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error}
        self.new += [key.node.name for key in new]
        self.left_out += closed
        if new and self.refuses:
            raise InputError("not confirmed")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    machines = Machines()
    monkeypatch.setattr("csdctl.transport.ssh.fetch_host_key", machines.fetch)
    return machines


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectDirectory:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return ProjectDirectory(tmp_path)


def stored(project: ProjectDirectory) -> list[str]:
    return project.known_hosts.read_text().splitlines() if project.known_hosts.exists() else []


def line(name: str, number: int) -> str:
    return f"{name} {TYPE} {base64.b64encode(blob_of(number)).decode()}"


def test_accepted_keys_are_stored_by_address_and_port_for_this_user_alone(
    project: ProjectDirectory, machines: Machines
) -> None:
    assert len(Reviewer(project).new) == 5
    order = [machines.asked.index(name) for name in ("outer", "gate", "csd0")]
    assert order == sorted(order), "a jump host comes before the machines behind it"
    places = {"10.0.0.1": 1, "[10.0.0.2]:2200": 2, "10.9.0.1": 3, "10.1.0.1": 4, "[10.1.0.1]:2222": 5}
    assert sorted(stored(project)) == sorted(line(*place) for place in places.items())
    assert stat.S_IMODE(project.known_hosts.stat().st_mode) == 0o600
    again = Reviewer(project)
    assert (again.new, again.errors) == ([], {})
    assert len(stored(project)) == 5


def test_refusal_and_dry_run_store_nothing(project: ProjectDirectory, machines: Machines) -> None:
    with pytest.raises(InputError, match="not confirmed"):
        Reviewer(project, refuses=True)
    assert stored(project) == []
    reviewer = Reviewer(project, is_dry_run=True)
    assert stored(project) == []
    assert sorted(reviewer.new) == ["csd1", "csd2", "outer"]
    assert reviewer.left_out == ["gate", "csd0"], "only a machine with a new key leads to them"


@pytest.mark.fault(5)
def test_changed_or_revoked_key_is_refused_and_the_stored_lines_stay(
    project: ProjectDirectory, machines: Machines
) -> None:
    Reviewer(project)
    with project.known_hosts.open("a") as file:
        file.write(f"@revoked {line('*', 5)}\n")
    before = stored(project)
    machines.keys["csd1"] = 9
    reviewer = Reviewer(project)
    assert "has changed" in reviewer.errors["csd1"]
    assert "is revoked" in reviewer.errors["csd2"]
    assert reviewer.new == []
    assert stored(project) == before


def test_keys_are_forgotten_by_name_alone(project: ProjectDirectory, machines: Machines) -> None:
    Reviewer(project)
    before = stored(project)
    csd1 = [FLEET.node("csd1")]
    assert forget_keys(csd1, project, is_dry_run=True) == {"csd1": 1}
    assert stored(project) == before
    assert forget_keys(csd1, project) == {"csd1": 1}
    assert {*before} - {*stored(project)} == {line("10.1.0.1", 4)}, "csd2 has the same address"
    assert forget_keys(csd1, project) == {"csd1": 0}
    check_forgotten(Fleet((FLEET.node("csd1"),)), project.root)
    behind = select_nodes(FLEET, ["gate"])
    assert forget_keys(keep_named(behind, ["gate"]).nodes, project) == {"gate": 1}
    assert keep_named(behind, ["csd*"]).nodes == (FLEET.node("csd0"),), "which is behind gate"


def test_key_that_remains_in_the_users_own_file_is_named(project: ProjectDirectory) -> None:
    (project.root / "home" / ".ssh").mkdir(parents=True)
    (project.root / "home" / ".ssh" / "known_hosts").write_text(f"# mine\n{line('[10.1.0.1]:2222', 5)}\n")
    with pytest.raises(HostKeyError, match=r"\.ssh/known_hosts:2") as raised:
        check_forgotten(FLEET, project.root)
    assert raised.value.node == "csd2"
    assert "-R '[10.1.0.1]:2222'" in raised.value.remedy
