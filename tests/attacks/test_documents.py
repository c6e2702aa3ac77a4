"""Files that others wrote: they cost little to refuse, and the refusal is one sentence.

Every attack runs `csdctl` with limits of memory and of CPU time that are far above what a refusal needs.
"""

import resource
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


ALIASES = "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
NO_HOSTS = '{"_meta": {"hostvars": {}}, '
GROUPS = ", ".join(f'"g{n}": {{"children": ["g{n + 1}"], "hosts": ["h{n}"]}}' for n in range(3000))
HOSTS = ", ".join(f'"h{n}"' for n in range(10_001))
JUMPS = "".join(f"- {{name: j{n}, address: x, jump: j{n + 1}}}\n" for n in range(3000))
KERAS = "keras.applications:MobileNetV2"
COMMANDS = {
    "job.yaml": ("train",),
    "fleet.yaml": ("inventory",),
    "hosts.json": ("discover", "--inventory", "hosts.json"),
    "config": ("discover", "--ssh-config", "config"),
}
REFUSED: dict[str, tuple[str, str | Path, str]] = {
    "aliases in a free part": ("job.yaml", JOB + "model_args:\n  a0: &a0 [x, x, x]\n" + ALIASES, "aliases"),
    "a device": ("job.yaml", Path("/dev/zero"), "not a regular file"),
    "a model that is a link": ("job.yaml", JOB.replace(KERAS, "link.keras"), "is a link to"),
    "ranges": (
        "fleet.yaml",
        "nodes:\n" + '- {name: "a[0-99999]", address: "b[0-99999]"}\n' * 500,
        "50,000,000 nodes",
    ),
    "hosts": ("hosts.json", NO_HOSTS + '"g": {"hosts": [' + HOSTS + "]}}", "10000 items"),
    "jump hosts behind each other": (
        "fleet.yaml",
        f"jump_hosts:\n{JUMPS}nodes: [{{name: a, address: b, jump: j0}}]\n",
        "more than 8 jump hosts",
    ),
    "groups": ("hosts.json", NO_HOSTS + GROUPS + "}", "1,000"),
    "values": ("hosts.json", '{"_meta": {"hostvars": {"h": {"x": [' + "0," * 9_000_000, "16,777,216 bytes"),
    "included files": ("config", "Include DIRECTORY/config\n" * 4 + "Host a\n", "200 included files"),
    "a long line": ("config", "H" * 50_000 + "Host a\n", "10,000"),
}
"""Name → file, content or target of a link, words of the refusal. `first` runs one of each kind."""


@pytest.mark.attack(16)
@pytest.mark.first(7)
@pytest.mark.parametrize(("name", "content", "word"), REFUSED.values(), ids=REFUSED)
def test_file_that_is_a_bomb_or_leads_elsewhere_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str | Path, word: str
) -> None:
    """A link of the job's author would send any file of the user, such as a key, to every node."""
    (tmp_path / "id_ed25519").write_text("a key of the user")
    (tmp_path / "link.keras").symlink_to(tmp_path / "id_ed25519")
    if name == "job.yaml":
        (tmp_path / "fleet.yaml").write_text(FLEET)
    if isinstance(content, Path):
        (tmp_path / name).symlink_to(content)
    else:
        (tmp_path / name).write_text(content.replace("DIRECTORY", str(tmp_path)))
    named = name if name.endswith(".yaml") else ""
    assert_refused(run_limited(tmp_path, *COMMANDS[name]), named, word)


@pytest.mark.attack(17)
def test_edited_plan_is_refused_with_its_field(tmp_path: Path) -> None:
    plan = (
        "schema_version: 1\njob: job\njob_fingerprint: '0'\nmethod: fit\nnum_probes: 1\n"
        "predicted: {global_batch: 16, batch_sizes: [8, 8], step_s: 1.0, samples_per_s: 16.0,\n"
        "  compute_share: 1.0, imbalance_share: 0.0, communication_share: 0.0}\n"
        "ranks:\n- {node: host, batch_size: 1000000000000, threads: 1, step_time_s: 0.5}\n"
        "- {node: csd0, batch_size: 8, threads: 1, step_time_s: 0.5}\n"
    )
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / ".csdctl" / "plans").mkdir(parents=True)
    (tmp_path / ".csdctl" / "plans" / "job.yaml").write_text(plan)
    assert_refused(run_limited(tmp_path, "forecast"), "`ranks.0.batch_size`")
