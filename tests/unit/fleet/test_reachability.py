"""Which machines must reach each other, and which machine fails its check when they do not."""

from csdctl.fleet.checks import ConnectAttempt, Status, judge_attempts, must_connect, pairs_to_try

MACHINES = ["host", *(f"csd{number}" for number in range(7))]


def attempts(*refused: tuple[str, str]) -> list[ConnectAttempt]:
    """Attempts between all pairs; `refused` are the client and server of those that time out."""
    return [
        ConnectAttempt(client, server, "10.1.1.9", 1024, "timed out" if (client, server) in refused else "")
        for client in MACHINES
        for server in MACHINES
        if client != server
    ]


def test_host_connects_with_every_node() -> None:
    assert all(must_connect(0, other, 100) and must_connect(other, 0, 100) for other in range(1, 100))


def test_nodes_connect_at_power_of_two_distances_modulo_ranks() -> None:
    partners = [other for other in range(1, 100) if other != 50 and must_connect(50, other, 100)]
    distances = {abs(other - 50) for other in partners}
    assert {1, 2, 4, 8, 16, 32} <= distances
    assert {3, 5, 6, 7} & distances == set()
    assert must_connect(1, 99, 100)


def test_small_fleet_tries_all_pairs_and_large_fleet_only_needed_pairs() -> None:
    assert pairs_to_try(MACHINES)["csd3"] == [name for name in MACHINES if name != "csd3"]
    large = pairs_to_try(["host", *(f"csd{number}" for number in range(999))])
    assert len(large["host"]) == 999
    assert len(large["csd500"]) < 40


def test_all_listeners_reachable_is_ok() -> None:
    assert {check.status for check in judge_attempts(MACHINES, attempts())} == {Status.OK}


def test_machine_that_no_other_reaches_fails_its_own_check() -> None:
    refused = [(name, "csd2") for name in MACHINES if name != "csd2"]
    red = [check for check in judge_attempts(MACHINES, attempts(*refused)) if check.status != Status.OK]
    assert [check.machine for check in red] == ["csd2"]
    assert red[0].status == Status.FAIL
    assert "host, csd[0-1], csd[3-6] cannot reach it at 10.1.1.9 port 1024: timed out" in red[0].found
    assert "firewall" in red[0].remedy


def test_node_that_cannot_reach_the_host_fails() -> None:
    red = [
        check for check in judge_attempts(MACHINES, attempts(("csd3", "host"))) if check.status != Status.OK
    ]
    assert [(check.machine, check.status) for check in red] == [("csd3", Status.FAIL)]
    assert red[0].found == "cannot reach host at 10.1.1.9 port 1024: timed out"


def test_pair_that_never_connects_in_training_is_a_warning() -> None:
    checks = judge_attempts(MACHINES, attempts(("csd0", "csd3")))
    assert [check.status for check in checks if check.machine == "csd0"] == [Status.WARN]
