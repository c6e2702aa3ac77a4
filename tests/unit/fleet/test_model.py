"""fleet.yaml, and the selection of nodes."""

from pathlib import Path

import pytest
import yaml

from csdctl.errors import InputError
from csdctl.fleet.ansible import render_inventory
from csdctl.fleet.fleet_file import load_fleet, render_fleet
from csdctl.fleet.model import BETWEEN_SERVERS, Fleet, Level, Node, select_nodes


def load(directory: Path, text: str) -> Fleet:
    path = directory / "fleet.yaml"
    path.write_text(text)
    return load_fleet(path)


def refused(directory: Path, text: str) -> str:
    with pytest.raises(InputError) as raised:
        load(directory, text)
    return str(raised.value)


OF_ALL = {
    "port": 23,
    "user": "all",
    "key": "all",
    "python": "/all",
    "group": "all",
    "jump": "all.lan",
    "power": 7,
}
OF_ONE = {
    "port": 24,
    "user": "one",
    "key": "one",
    "python": "/one",
    "group": "one",
    "jump": "one.lan",
    "power": 0,
}


@pytest.mark.parametrize("key", OF_ALL)
def test_setting_of_a_node_comes_before_the_setting_of_all_nodes(tmp_path: Path, key: str) -> None:
    entry = {"name": "a", "address": "a", key: OF_ONE[key]}
    [node] = load(tmp_path, yaml.safe_dump({"defaults": OF_ALL, "nodes": [entry]})).nodes
    assert node.power
    assert node.jump
    key_name, watts = node.key and node.key.relative_to(tmp_path).name, node.power.watts
    values = (node.port, node.user, key_name, node.python, *node.groups, node.jump.address, watts)
    assert dict(zip(OF_ALL, values, strict=True)) == OF_ALL | {key: OF_ONE[key]}


@pytest.mark.parametrize("emulated", [False, True])
def test_device_is_stated_for_each_machine(tmp_path: Path, *, emulated: bool) -> None:
    nodes = "nodes: [{name: a, address: a}, {name: b, address: b, device: auto}]"
    fleet = load(tmp_path, f"emulated: {emulated}\nhost: {{device: cpu}}\ndefaults: {{device: gpu}}\n{nodes}")
    devices = [fleet.device_of(name) for name in fleet.machines]
    assert devices == (["cpu"] * 3 if emulated else ["cpu", "gpu", "auto"])


class TestJumps:
    def test_jump_host_by_name_has_user_and_key_of_the_defaults(self, tmp_path: Path) -> None:
        text = (
            "defaults: {user: me, key: id, port: 2222, jump: gw}\n"
            "jump_hosts: [{name: gw, address: 10.0.0.1, jump: outer}, "
            "{name: outer, address: o.lan, user: ops}]\n"
            "nodes: [{name: a, address: 10.1.0.1}, {name: b, address: 10.1.0.2, jump: none}]"
        )
        first, second = load(tmp_path, text).nodes
        outer = Node("outer", "o.lan", 22, "ops", tmp_path / "id")
        assert first.jump == Node("gw", "10.0.0.1", 22, "me", tmp_path / "id", jump=outer)
        assert second.jump is None

    @pytest.mark.parametrize(
        ("jump", "chain"),
        [
            ("10.0.0.9", [("10.0.0.9", "root", 22)]),
            ("ops@gw.lan:2200", [("gw.lan", "ops", 2200)]),
            ("ops@[fd00::1]:2200", [("fd00::1", "ops", 2200)]),
            ("[fd00::1]", [("fd00::1", "root", 22)]),
            ("first,you@second:23", [("second", "you", 23), ("first", "root", 22)]),
        ],
    )
    def test_jump_may_be_an_address_as_in_proxyjump(
        self, tmp_path: Path, jump: str, chain: list[tuple[str, str, int]]
    ) -> None:
        (node,) = load(tmp_path, f"nodes: [{{name: a, address: b, jump: '{jump}'}}]").nodes
        assert [(hop.address, hop.user, hop.port) for hop in node.jumps] == chain

    @pytest.mark.fault(40)
    @pytest.mark.parametrize(
        "jump",
        ["-oProxyCommand=x", "$(x)@gw", "a b", "gw:0", "gw:99999", "@gw", "gw:", ",", "-x@gw", "fd00::1"],
    )
    def test_ambiguous_jump_is_refused(self, tmp_path: Path, jump: str) -> None:
        message = refused(tmp_path, f"nodes:\n- {{name: a, address: b, jump: '{jump}'}}")
        assert "fleet.yaml:2: `nodes.0.jump`" in message


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", "-oProxyCommand=touch pwned"),
        ("address", "$(id)"),
        ("name", "-x"),
        ("user", "$USER"),
        ("user", "ro\\ot"),
        ("group", "a b"),
        ("python", "-c"),
    ],
)
@pytest.mark.parametrize("place", ["nodes", "jump_hosts"])
def test_values_like_options_or_shell_text_are_refused(
    tmp_path: Path, place: str, key: str, value: str
) -> None:
    if key in ("group", "python") and place == "jump_hosts":
        return
    entry = {"name": "a", "address": "b", key: value}
    content = {"jump_hosts": [], "nodes": [{"name": "x", "address": "x"}], place: [entry]}
    message = refused(tmp_path, yaml.safe_dump(content))
    assert f"`{place}.0.{key}" in message
    assert ("should match pattern" if key == "python" else "not a valid") in message


@pytest.mark.fault(38)
def test_unknown_key_is_reported_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    message = refused(tmp_path, "nodes:\n- name: a\n  address: b\n  prot: 22\njumphosts: []")
    assert "fleet.yaml:4: unknown key `nodes.0.prot`, did you mean `port`?" in message
    assert "fleet.yaml:5: unknown key `jumphosts`, did you mean `jump_hosts`?" in message


@pytest.mark.parametrize("address", ["fe80::1", "FEB0::[1-2]", "fe80::1%", "fe80::[1-2]%eth0"])
def test_link_local_address_needs_its_interface(tmp_path: Path, address: str) -> None:
    name = "csd[1-2]" if "[" in address else "csd1"
    text = f"nodes: [{{name: '{name}', address: '{address}'}}]"
    if address.endswith("%eth0"):
        assert [node.address for node in load(tmp_path, text).nodes] == ["fe80::1%eth0", "fe80::2%eth0"]
    else:
        assert "a link-local one needs its interface: fe80::1%eth0" in refused(tmp_path, text)


class TestWriting:
    GATE = Node("gw", "10.0.0.1", 2200, "ops", Path("/k/gate"), jump=Node("outer", "o.lan", user="ops"))

    @pytest.mark.parametrize(
        "nodes",
        [
            [Node(f"csd{k}", f"10.1.1.{k + 2}", 2200, key=Path("/k/id")) for k in range(36)],
            [Node(f"csd{k:02d}", f"csd{k:02d}.lan", user="me", groups=("a", "b")) for k in range(12)],
            [Node("a", "fd00::1"), Node("b", "fd00::2", 23, key=Path("/k")), Node("c", "x", groups=("g",))],
            [Node("a", "a", jump=GATE), Node("b", "b", jump=GATE), Node("c", "c")],
            [Node("gw", "elsewhere"), Node("b", "b", jump=GATE)],
            [Node("a", "10.0.0.1"), Node("b", "10.9.0.2", jump=Node("a", "10.0.0.1"))],
            [
                Node("a", "a", key=Path("/k"), other_keys=(Path("/l"),), offers_agent=True, jump=GATE),
                Node("b", "b", key=Path("/k"), other_keys=(Path("/l"),), offers_agent=True),
            ],
        ],
    )
    def test_written_fleet_round_trips_after_a_line_with_its_origin(
        self, tmp_path: Path, nodes: list[Node]
    ) -> None:
        fleet = Fleet(tuple(nodes), network="10.1.1.0/24", path=tmp_path / "fleet.yaml")
        text = render_fleet(fleet, origin="Written from x\nnetwork: 10.0.0.0/8\n\u2028y")
        again = load(tmp_path, text)
        assert [without_jump_names(node) for node in again.nodes] == [without_jump_names(n) for n in nodes]
        assert again.network == fleet.network
        assert len(nodes) < 36 or yaml.safe_load(text)["nodes"][0]["name"] == "csd[0-35]"
        assert ("jump_hosts" in text) == (self.GATE in [node.jump for node in nodes])


def without_jump_names(node: Node | None) -> tuple[object, ...] | None:
    if node is None:
        return None
    name = node.name if node.groups or node.jump is None else ""
    values = (node.address, node.port, node.user, node.keys, node.offers_agent, node.groups)
    return (name, *values, without_jump_names(node.jump) and without_jump_names(node.jump)[1:])  # type: ignore[index]


NAMES = [f"csd{number}" for number in range(12)] + [f"dpu{number:02d}" for number in range(12)] + ["jetson"]
FLEET = Fleet(
    tuple(
        Node(name, "10.1.1.1", groups=("front",) if name in ("csd0", "csd11", "jetson") else ("back",))
        for name in NAMES
    ),
    path=Path("fleet.yaml"),
)


def chosen(*limit: str, exclude: tuple[str, ...] = ()) -> list[str]:
    return [node.name for node in select_nodes(FLEET, limit, exclude).nodes]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("csd3", ["csd3"]),
        ("csd1*", ["csd1", "csd10", "csd11"]),
        ("csd?", [f"csd{k}" for k in range(10)]),
        ("csd[0-7]", [f"csd{k}" for k in range(8)]),
        ("dpu[08-10]", ["dpu08", "dpu09", "dpu10"]),
        ("dpu[0-1][0-1]", ["dpu00", "dpu01", "dpu10", "dpu11"]),
        ("[c-d]*0", ["csd0", "csd10", "dpu00", "dpu10"]),
        ("front", ["csd0", "csd11", "jetson"]),
        ("csd0,jetson", ["csd0", "jetson"]),
        ("all", [node.name for node in FLEET.nodes]),
        (" csd0 , csd[2-3] ,", ["csd0", "csd2", "csd3"]),
    ],
)
def test_pattern_selects_names_in_fleet_order(pattern: str, names: list[str]) -> None:
    assert chosen(pattern) == names


def test_excluded_nodes_are_removed_from_the_selection() -> None:
    assert chosen("csd*", exclude=("csd[2-99]", "front")) == ["csd1"]
    assert select_nodes(FLEET, exclude=["*"], may_be_empty=True).nodes == (), "the host alone is enough"


@pytest.mark.fault(39)
@pytest.mark.parametrize("option", ["limit", "exclude"])
@pytest.mark.parametrize("pattern", ["csd12", "CSD0", "nowhere*", "csd[20-30]"])
def test_pattern_without_a_match_is_refused_with_the_nodes(option: str, pattern: str) -> None:
    with pytest.raises(InputError) as raised:
        select_nodes(FLEET, **{option: [f"csd0,{pattern}"]})
    assert str(raised.value).splitlines()[0] == f"{option} {pattern!r} matches no node of fleet.yaml"
    assert raised.value.remedy == "nodes: csd[0-11], dpu[00-11], jetson; groups: all, back, front"


SERVERS = """\
network: 192.168.7.0/24
defaults: {group: csds}
servers:
- name: storage1
  address: localhost
  network: 10.1.1.0/24
  nodes: [{name: "csd[0-1]", address: "10.1.1.[2-3]"}]
- {name: storage2, address: 192.168.7.2, network: 10.1.1.0/24, nodes: [{name: csd0, address: 10.1.1.2}]}
- {name: storage3, address: 192.168.7.3, user: admin, nodes: [{name: csd0, address: 10.1.1.2}]}
"""


class TestServers:
    def test_nodes_are_named_after_their_server_and_reached_through_it(self, tmp_path: Path) -> None:
        fleet = load(tmp_path, SERVERS)
        assert fleet.machines == (
            *("host", "storage1/csd0", "storage1/csd1", "storage2", "storage2/csd0"),
            *("storage3", "storage3/csd0"),
        )
        assert fleet.here == "storage1"
        assert fleet.node("storage1/csd1").jumps == ()
        (jump,) = fleet.node("storage3/csd0").jumps
        assert (jump.name, jump.address, jump.user) == ("storage3", "192.168.7.3", "admin")
        assert fleet.node("storage3/csd0").groups == ("csds", "storage3")
        assert fleet.node("storage2/csd0").address == fleet.node("storage3/csd0").address
        assert fleet.node("storage2/csd0").key_address == "storage2/csd0", "it has a host key of its own"
        assert fleet.node("storage2").key_address == "192.168.7.2"

    def test_mpirun_connects_each_server_with_its_nodes_and_the_servers(self, tmp_path: Path) -> None:
        fleet = load(tmp_path, SERVERS)
        assert fleet.levels(fleet.machines) == (
            Level("host", ("host", "storage1/csd0", "storage1/csd1"), "10.1.1.0/24"),
            Level("storage2", ("storage2", "storage2/csd0"), "10.1.1.0/24"),
            Level("storage3", ("storage3", "storage3/csd0"), ""),
            Level(BETWEEN_SERVERS, ("host", "storage2", "storage3"), "192.168.7.0/24"),
        )
        assert fleet.levels(["host", "storage2/csd0", "storage3"]) == (
            Level(BETWEEN_SERVERS, ("host", "storage3"), "192.168.7.0/24"),
        ), "a node without its server is connected with nothing"
        alone = load(tmp_path, "network: 10.1.1.0/24\nnodes: [{name: csd0, address: 10.1.1.2}]")
        assert alone.levels(alone.machines) == (Level("host", ("host", "csd0"), "10.1.1.0/24"),)

    @pytest.mark.parametrize(
        ("limit", "exclude", "selected"),
        [
            (["storage2/*"], [], ["storage2", "storage2/csd0"]),
            (["storage3"], [], ["storage3", "storage3/csd0"]),
            (["storage1/csd[0-1]"], [], ["storage1/csd0", "storage1/csd1"]),
            ([], ["storage2", "storage1/*"], ["storage3", "storage3/csd0"]),
            (["storage[1-2]"], ["*/csd1"], ["storage1/csd0", "storage2", "storage2/csd0"]),
            ([], ["storage[2-3]"], ["storage1/csd0", "storage1/csd1"]),
            ([], ["big"], ["storage1/csd0", "storage1/csd1", "storage3", "storage3/csd0"]),
        ],
    )
    def test_server_is_selected_or_excluded_with_its_nodes(
        self, tmp_path: Path, limit: list[str], exclude: list[str], selected: list[str]
    ) -> None:
        big = SERVERS.replace("{name: storage2, ", "{name: storage2, group: big, ")
        fleet = select_nodes(load(tmp_path, big), limit, exclude)
        assert [node.name for node in fleet.nodes] == selected
        assert {name for name, _ in fleet.networks} == {node.server for node in fleet.nodes} - {""}

    def test_command_on_each_node_does_not_run_on_its_server(self, tmp_path: Path) -> None:
        (node,) = select_nodes(load(tmp_path, SERVERS), ["storage2/csd0"], with_servers=False).nodes
        assert (node.name, node.jump and node.jump.name) == ("storage2/csd0", "storage2")

    def test_ansible_tells_apart_nodes_with_one_address_and_knows_their_networks(
        self, tmp_path: Path
    ) -> None:
        fleet = load(tmp_path, SERVERS)
        text = render_inventory(fleet, {node.name: () for node in fleet.nodes})
        hosts = yaml.safe_load(text)["csdctl_fleet"]["hosts"]
        assert len({host["ansible_control_path"] for host in hosts.values()}) == len(fleet.nodes)
        networks = {name: host["node_network"] for name, host in hosts.items()}
        assert networks["storage1/csd0"] == networks["storage2/csd0"] == "10.1.1.0/24"
        assert networks["storage2"] == "10.1.1.0/24,192.168.7.0/24"
        assert (networks["storage3"], networks["storage3/csd0"]) == ("192.168.7.0/24", "")

    def test_fleet_without_this_machine_is_refused_unless_it_does_not_train(self, tmp_path: Path) -> None:
        elsewhere = SERVERS.replace("localhost", "192.168.7.1")
        assert "none of them has an address of this machine" in refused(tmp_path, elsewhere)
        fleet = load(tmp_path, f"host: {{trains: false}}\n{elsewhere}")
        first, *_, between = fleet.levels(fleet.machines)
        assert first == Level("storage1", ("storage1", "storage1/csd0", "storage1/csd1"), "10.1.1.0/24")
        assert between.machines == ("host", "storage1", "storage2", "storage3")

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ("storage3, ", "storage2, ", "two of `servers` have one name"),
            ("nodes: [{name: csd0,", "nodes: [{name: csd0, jump: gate,", "received `jump` in server"),
            ("servers:", "nodes: [{name: a, address: a}]\nservers:", "received both `nodes` and `servers`"),
        ],
    )
    def test_contradictions_are_refused(self, tmp_path: Path, before: str, after: str, message: str) -> None:
        assert message in refused(tmp_path, SERVERS.replace(before, after))
