"""Files that others wrote: they cost little to refuse, and the refusal is one sentence.

Every attack runs `csdctl` with limits of memory and of CPU time that are far above what a refusal needs.
"""

import resource
import socket
import subprocess
from pathlib import Path

import pytest

from tests.emulated.running import CSDCTL

pytestmark = pytest.mark.first(1)

MEMORY_BYTES = 2 << 30
CPU_S = 60
"""Limit for one command; a refusal takes about a second, nearly all of it for imports."""
MAX_MESSAGE = 2500

FLEET = "nodes:\n- {name: csd0, address: 192.0.2.1}\n"
JOB = """\
model: keras.applications:MobileNetV2
data: {public: {path: data}}
recipe: {epochs: 1, learning_rate: 0.1}
"""


def run_limited(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))

    return subprocess.run(
        [str(CSDCTL), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        preexec_fn=limit,
    )


def assert_refused(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """One error with exit code 2, and no defect: neither a traceback nor a request to report one."""
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.startswith("error:")
    assert "bug in csdctl" not in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < MAX_MESSAGE
    for word in words:
        assert word in done.stderr.replace("\n", " ")


def bomb(first: str, levels: int, use: str) -> str:
    """Lines of which each is nine times as large as the one before."""
    lines = [f"  a0: &a0 {first}"]
    for number in range(1, levels):
        aliases = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"  a{number}: &a{number} {use.format(aliases)}")
    return "\n".join(lines) + "\n"


JOBS = {
    "aliases in a free part": (
        JOB + "model_args:\n" + bomb("[x, x, x, x, x, x, x, x, x]", 10, "[{}]"),
        "aliases",
    ),
    "merge keys": (JOB + "model_args:\n" + bomb("{k: 1}", 9, "{{<<: [{}]}}"), "aliases"),
    "alias of itself": (JOB + "model_args: {x: &a [*a]}\n", "`*a` is part of what it stands for"),
    "20 MB of text": (JOB.replace("data}", "x" * 20_000_000 + "}"), "2,097,152 bytes"),
    "30,000 unknown keys": (JOB + "".join(f"k{n}: 1\n" for n in range(30_000)), "29,980 more problems"),
    "tag of Python": (JOB + "model_args: {a: !!python/object/apply:os.abort []}\n", "python/object/apply"),
    "escape of a terminal": (JOB.replace("data}", '"\\e]52;c;eA==\\a"}'), "U+001B"),
}


@pytest.mark.attack(16)
@pytest.mark.parametrize("attack", JOBS)
def test_job_that_is_a_bomb_is_refused_in_one_sentence(tmp_path: Path, attack: str) -> None:
    text, word = JOBS[attack]
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert_refused(run_limited(tmp_path, "train"), "job.yaml", word)


@pytest.mark.attack(16)
def test_job_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(JOB.encode("utf-16"))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert_refused(run_limited(tmp_path, "train"), "job.yaml")


@pytest.mark.attack(16)
def test_link_to_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to("/dev/zero")
    assert_refused(run_limited(tmp_path, "train"), "job.yaml", "not a regular file")


FLEETS = {
    "ranges": ("nodes:\n" + '- {name: "a[0-99999]", address: "b[0-99999]"}\n' * 500, "50,000,000 nodes"),
    "jump hosts behind each other": (
        "jump_hosts:\n"
        + "".join(f"- {{name: j{n}, address: x, jump: j{n + 1}}}\n" for n in range(3000))
        + "nodes: [{name: a, address: b, jump: j0}]\n",
        "more than 8 jump hosts",
    ),
    "program that is an option": ("nodes: [{name: a, address: b, python: -c}]\n", "nodes.0.python"),
}


@pytest.mark.attack(16)
@pytest.mark.parametrize("attack", FLEETS)
def test_fleet_that_is_a_bomb_is_refused_in_one_sentence(tmp_path: Path, attack: str) -> None:
    text, word = FLEETS[attack]
    (tmp_path / "fleet.yaml").write_text(text)
    assert_refused(run_limited(tmp_path, "inventory"), "fleet.yaml", word)


NO_HOSTS = '{"_meta": {"hostvars": {}}, '
GROUPS = ", ".join(f'"g{n}": {{"children": ["g{n + 1}"], "hosts": ["h{n}"]}}' for n in range(3000))
HOSTS = ", ".join(f'"h{n}"' for n in range(10_001))
INVENTORIES = {
    "hosts.json: hosts": (NO_HOSTS + '"g": {"hosts": [' + HOSTS + "]}}", "10000 items"),
    "hosts.json: groups": (NO_HOSTS + GROUPS + "}", "1,000"),
    "hosts.json: values": ('{"_meta": {"hostvars": {"h": {"x": [' + "0," * 9_000_000, "16,777,216 bytes"),
}


@pytest.mark.attack(16)
@pytest.mark.parametrize("attack", INVENTORIES)
def test_inventory_that_is_a_bomb_is_refused_in_one_sentence(tmp_path: Path, attack: str) -> None:
    name = attack.partition(":")[0]
    (tmp_path / name).write_text(INVENTORIES[attack][0])
    assert_refused(run_limited(tmp_path, "discover", "--inventory", name), INVENTORIES[attack][1])


@pytest.mark.attack(16)
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Include /dev/zero\n", "not a regular file"),
        ("Include config\n" * 4, "200 included files"),
        ("H" * 50_000, "10,000"),
    ],
)
def test_ssh_config_that_is_a_bomb_is_refused_in_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config").write_text(text.replace("config", str(tmp_path / "config")) + "Host a\n")
    assert_refused(run_limited(tmp_path, "discover", "--ssh-config", "config"), word)


KERAS = "keras.applications:MobileNetV2"


@pytest.mark.attack(16)
@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (JOB.replace(KERAS, "link.keras"), "is a link to"),
        (JOB.replace(KERAS, "keras.applications:__class__"), "not a valid reference"),
        (JOB.replace(KERAS, "-m.keras"), "-m.keras does not exist"),
        (JOB.replace("data}", "data, function: link.py:load}"), "is a link to"),
        (JOB.replace("data}", "data, function: ../../etc/passwd:load}"), "was not found"),
        (JOB.replace("0.1", "0.1, metrics: [link.py:load]"), "is a link to"),
    ],
)
def test_reference_that_leads_elsewhere_is_refused(tmp_path: Path, job: str, problem: str) -> None:
    """A link of the job's author would send any file of the user, such as a key, to every node."""
    (tmp_path / "id_ed25519").write_text("a key of the user")
    for name in ("link.keras", "link.py"):
        (tmp_path / name).symlink_to(tmp_path / "id_ed25519")
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert_refused(run_limited(tmp_path, "train"), problem)


@pytest.mark.attack(17)
@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ("batch_size: 8 -> batch_size: 1000000000000", "`ranks.0.batch_size`"),
        ("node: host -> node: csd1", "first rank is not `host`"),
        ("global_batch: 16 -> global_batch: 17", "batch_sizes add up to 16"),
    ],
)
def test_edited_plan_is_refused_with_its_field(tmp_path: Path, edit: str, problem: str) -> None:
    plan = (
        "schema_version: 1\njob: job\njob_fingerprint: '0'\nmethod: fit\nnum_probes: 1\n"
        "predicted: {global_batch: 16, batch_sizes: [8, 8], step_s: 1.0, samples_per_s: 16.0,\n"
        "  compute_share: 1.0, imbalance_share: 0.0, communication_share: 0.0}\n"
        "ranks:\n- {node: host, batch_size: 8, threads: 1, step_time_s: 0.5}\n"
        "- {node: csd0, batch_size: 8, threads: 1, step_time_s: 0.5}\n"
    )
    written, _, edited = edit.partition(" -> ")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / ".csdctl" / "plans").mkdir(parents=True)
    (tmp_path / ".csdctl" / "plans" / "job.yaml").write_text(plan.replace(written, edited, 1))
    assert_refused(run_limited(tmp_path, "forecast"), problem)


@pytest.mark.thorough
@pytest.mark.attack(17)
def test_node_with_a_name_of_the_host_is_refused(tmp_path: Path) -> None:
    """mpirun would start its link here."""
    hostname = socket.gethostname()
    for name in (hostname.upper(), f"{hostname}.example.com", "127.0.0.1"):
        (tmp_path / "fleet.yaml").write_text(f"nodes: [{{name: {name}, address: 192.0.2.1}}]\n")
        assert_refused(
            run_limited(tmp_path, "inventory"), f"'{name}' is not allowed as a node name", "another `name`"
        )
    (tmp_path / "fleet.yaml").write_text(
        "nodes: [{name: csd0.a, address: 192.0.2.1}, {name: csd0.b, address: 192.0.2.2}]\n"
    )
    assert_refused(run_limited(tmp_path, "inventory"), "'csd0.a' and 'csd0.b' for one node")
