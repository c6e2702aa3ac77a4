"""Which machines must reach each other, and who is to blame when they do not."""

from csdctl.fleet.checks import Status
from csdctl.fleet.reachability import ConnectAttempt, judge_attempts, must_connect, pairs_to_try

MACHINES = ["host", *(f"csd{number}" for number in range(7))]


def knocks(*refused: tuple[str, str]) -> list[ConnectAttempt]:
    """Everybody knocks at everybody; `refused` are visitor and owner of those that time out."""
    return [
        ConnectAttempt(visitor, owner, "10.1.1.9", 1024, "timed out" if (visitor, owner) in refused else "")
        for visitor in MACHINES
        for owner in MACHINES
        if visitor != owner
    ]


def test_host_talks_with_every_node() -> None:
    assert all(must_connect(0, other, 100) and must_connect(other, 0, 100) for other in range(1, 100))


def test_nodes_talk_at_distances_of_powers_of_two_counted_around_the_end() -> None:
    partners = [other for other in range(1, 100) if other != 50 and must_connect(50, other, 100)]
    distances = {abs(other - 50) for other in partners}
    assert {1, 2, 4, 8, 16, 32} <= distances
    assert {3, 5, 6, 7} & distances == set()
    assert must_connect(1, 99, 100)


def test_small_fleet_tries_all_pairs_and_a_large_one_those_that_talk() -> None:
    assert pairs_to_try(MACHINES)["csd3"] == [name for name in MACHINES if name != "csd3"]
    large = pairs_to_try(["host", *(f"csd{number}" for number in range(999))])
    assert len(large["host"]) == 999
    assert len(large["csd500"]) < 40


def test_all_doors_open_is_green() -> None:
    assert {check.status for check in judge_attempts(MACHINES, knocks())} == {Status.OK}


def test_machine_that_nobody_reaches_is_red_itself() -> None:
    refused = [(name, "csd2") for name in MACHINES if name != "csd2"]
    red = [check for check in judge_attempts(MACHINES, knocks(*refused)) if check.status != Status.OK]
    assert [check.machine for check in red] == ["csd2"]
    assert red[0].status == Status.FAIL
    assert (
        "host, csd0, csd1, csd3 and 3 more cannot reach it at 10.1.1.9 port 1024: timed out" in red[0].found
    )
    assert "firewall" in red[0].remedy


def test_node_that_cannot_reach_the_host_is_red() -> None:
    red = [check for check in judge_attempts(MACHINES, knocks(("csd3", "host"))) if check.status != Status.OK]
    assert [(check.machine, check.status) for check in red] == [("csd3", Status.FAIL)]
    assert red[0].found == "cannot reach host at 10.1.1.9 port 1024: timed out"


def test_pair_that_never_talks_is_amber() -> None:
    checks = judge_attempts(MACHINES, knocks(("csd0", "csd3")))
    assert [check.status for check in checks if check.machine == "csd0"] == [Status.WARN]
