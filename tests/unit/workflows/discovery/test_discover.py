"""The result of `discover`."""

from pathlib import Path

import pytest

from csdctl.errors import UnreachableError
from csdctl.fleet.facts import Facts, facts_path, load_facts, save_facts
from csdctl.fleet.model import Fleet, Node
from csdctl.workflows.discovery.discover import (
    collect_all_facts,
    discover,
    find_shared_addresses,
    find_shared_host_keys,
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


def test_machine_that_cannot_be_probed_has_a_problem_and_does_not_stop_others() -> None:
    fleet = Fleet((Node("csd0", "10.0.0.1"),))
    facts = collect_all_facts(fleet, {"csd0": FakeSession("csd0")})
    assert "probing failed" in (facts["csd0"].problem or "")


@pytest.mark.fault(15)
def test_nodes_with_the_same_host_key_are_a_warning() -> None:
    fingerprints = {"csd0": "SHA256:a", "csd1": "SHA256:b", "csd2": "SHA256:a"}
    (warning,) = find_shared_host_keys(fingerprints)
    assert warning.startswith("csd0, csd2 have the same host key SHA256:a")


@pytest.mark.fault(13)
def test_nodes_with_the_same_address_and_port_are_a_warning() -> None:
    nodes = [Node(f"csd{number}", "10.0.0.1", port=22 if number < 2 else number) for number in range(4)]
    (warning,) = find_shared_addresses(Fleet(tuple(nodes)))
    assert warning == "csd0, csd1 have the same address 10.0.0.1 port 22: one machine listed twice"


@pytest.mark.fault(36)
@pytest.mark.parametrize("content", ['{"machines": {"csd0"', '{"schema": 0, "machines": {}}', "[]", "\xff"])
def test_unreadable_facts_are_set_aside_with_a_warning(tmp_path: Path, content: str) -> None:
    fleet = Fleet((Node("csd0", "127.0.0.1", port=1),), path=tmp_path / "fleet.yaml")
    path = facts_path(fleet)
    path.write_text(content, encoding="latin-1")
    result = discover(fleet, directory=tmp_path)
    aside = path.with_name("fleet.facts.json.bak")
    assert aside.read_text(encoding="latin-1") == content
    assert set(load_facts(fleet)) == {"host", "csd0"}
    assert [warning for warning in result.warnings if str(aside) in warning]
