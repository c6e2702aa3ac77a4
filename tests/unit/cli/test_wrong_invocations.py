"""Wrong command lines and files: the exit code, and the sentence that names what is wrong.

Nothing is written for wrong input. Only closed ports of this machine are contacted.
"""

import re
import shlex
from io import StringIO
from pathlib import Path

import pytest

from csdctl.cli.app import run_command
from csdctl.errors import ExitCode
from csdctl.terminal.streams import Streams
from csdctl.workflows.workspace.workspace import load_failed

OPTION = re.compile(r"--[\w-]+")
JOB = "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
PROJECT = {
    "fleet.yaml": "nodes: [{name: 'csd[0-3]', address: '192.0.2.[1-4]'}]\n",
    "data/a/b": "",
    "model.py": "def build():\n    import keras\n    return keras.Sequential([])\n",
    "job.yaml": JOB,
    "junk.keras": "junk",
    ".csdctl/runs/20260101-000000-000001/x": "",
    ".csdctl/runs/20260102-000000-000002/x": "",
}
FLEET = "nodes: [{name: a, address: 1.1.1.1}]"
IN_FLEET = "exec --fleet f.yaml -- true"
FAILED_FROM = "exec --failed-from x.json -- true"
INVENTORY = '{"_meta": {"hostvars": {"csd0": {}}}}'
BUILD = "def build(): pass\n"
BAD_JOBS = [
    ("model.py:build", "model.py:nope", ": model.py has no function 'nope'"),
    ("{public: {path: data}}", "7", ":2: `data`: must have keys such as public, private, validation"),
    ("epochs: 1", "epochs: 0", ":3: `recipe.epochs`: expected 1 to 1,000,000 (received 0)"),
    ("epochs: 1", "epoch: 1", ":3: `recipe.epochs`: must be a whole number (received nothing)"),
    ("0.1", ".nan", ":3: `recipe.learning_rate`"),
    ("0.1", "-1", ":3: `recipe.learning_rate`: expected a number above 0 (received -1)"),
    ("data}}", "data, on: nodes}}", ":2: `data.public.on`: must be 'host' or 'every-node'"),
    ("\nrecipe: {epochs: 1, learning_rate: 0.1}", "", ": key `recipe` is missing"),
    ("model.py:build", "''", ":1: `model`: String should have at least 1 character"),
    ("build\n", "build\ncode: [nope.py]\n", ": code 'nope.py' is neither a .py file nor a directory"),
    (JOB, "", ": expected keys such as model, data, recipe, received an empty file"),
    (JOB, "model: [", ":1: not valid YAML: expected the node content, but found '<stream end"),
    (JOB, "model: a\nmodel: b", ":2: not valid YAML: duplicate key `model`"),
    (JOB, "\tmodel: a", ":1: not valid YAML: found character '\\t' that cannot start any token"),
]
"""What is replaced in JOB, by what, and what `train` says after the name of the file."""
BAD_FLEETS = [
    ("[{name: a, address: 1.1.1.1}]", "7", ":1: `nodes`: must be a list (received 7)"),
    ("[{name: a, address: 1.1.1.1}]", "[]", ": the fleet is empty"),
    (", address: 1.1.1.1", "", ":1: key `nodes.0.address` is missing"),
    ("a,", "'a b',", ":1: `nodes.0.name`: not a valid name (letters, digits, '.', '_', '-')"),
    ("a,", "'a[0-2]',", ":1: `nodes.0`: name 'a[0-2]' expands to 3 nodes, but address '1.1.1.1' to 1"),
    ("a,", "'a[0-999999999]',", ":1: `nodes.0.name`: 'a[0-999999999]' expands to more than 100,000 names"),
    ("}]", "},{name: a, address: 1.1.1.2}]", ": two nodes have the name 'a'"),
    ("address", "key: id.pub, address", ":1: `nodes.0.key`: expected the private key, probably id"),
    ("nodes:", "network: 10.0.0.0/99\nnodes:", ":1: `network`: '10.0.0.0/99' does not appear to be an IP"),
    ("1.1.1.1", "1.1.1.1, port: 99999", ":1: `nodes.0.port`: must be less than or equal to 65535"),
    ("1.1.1.1", "1.1.1.1, private_key: x", ":1: unknown key `nodes.0.private_key`, did you mean `key`?"),
    ("1.1.1.1", "1.1.1.1, jump: a", ": cyclic jumps: a → a"),
    ("nodes: [{", "jump_hosts: [{name: g, address: g, jump: g}]\nnodes: [{jump: g, ", ": cyclic jumps"),
    ("1.1.1.1", "1.1.1.1, device: tpu", ":1: `nodes.0.device`: expected one of 'auto', 'cpu', 'gpu'"),
    ("1.1.1.1", "1.1.1.1, power: {source: constant}", ":1: `nodes.0.power`: source constant needs `watts`"),
]
"""The same of FLEET and `exec`."""
BAD_VALUES = [
    ("discover --cidr 10.0.0.0/30 --port 0", "must be greater than or equal to 1"),
    ("predict junk.keras --on nope", "'nope' is not one of 'private', 'public', 'valida"),
    ("train --batch-size 0", "must be greater than or equal to 1"),
    ("train --batch-size x", "must be a whole number (received 'x')"),
    ("exec --timeout -1 -- true", "must be greater than or equal to 0.001"),
]
"""Command lines with a wrong value of their last option, and what is said of it."""
WITHOUT_PROJECT = [
    ("init --model nope.py:build --public data", "--public: data does not exist"),
    ("init --model nope.py:build --public .", "--model: nope.py does not exist"),
    ("init", "missing a training SCRIPT, or --model and --public"),
    ("trian", "no such command 'trian'. Did you mean 'train'?"),
    ("--nope", "no such option: --nope"),
    ("train job.yaml", "job.yaml does not exist"),
    ("discover --cidr 10.0.0.0/4", "10.0.0.0/4 has 268435456 addresses, but at most 4096 are scanned"),
    ("discover --cidr nope", "'nope' is not an address range"),
    ("discover --cidr 10.0.0.0/30 --user 'a b'", "--user 'a b' is not a user name"),
    ("discover --cidr 10.0.0.0/30 --key /nope", "--key /nope does not exist"),
    ("discover --user x", "--user applies only to machines that --cidr finds"),
    ("discover --cidr 10.0.0.0/30 --inventory x", "a fleet file is written from one source, received 2"),
    ("discover --inventory nope", "nope does not exist"),
    ("discover", "fleet.yaml does not exist"),
    ("emulate up --memory lots", "received 'lots' as a size, expected a number and a unit"),
    ("emulate up --memory 1K", "`memory_bytes`: must be greater than or equal to 16777216 (received 1024)"),
    ("emulate up --cpu 0", "emulated fleet: `cpu.0`: must be greater than or equal to 0.01 (received 0.0)"),
    ("emulate up --cpu 1,1 --nodes 3", "received --cpu 1,1 with 2 values for --nodes 3, expected one value"),
    ("emulate up --pid 99999999", "received 99999999 as the process that the emulated fleet ends with"),
]
"""Command line, and a part of the message."""
IN_PROJECT = [
    (
        "init --model model.py:build --public data --model-args 7 --force",
        "--model-args:1: `model_args`: must be keys with values, such as {key: value} (received 7)",
    ),
    (
        "init --model model.py:build --public data --model-args '{' --force",
        "--model-args:1: not valid YAML: expected the node content, but found '<stre",
    ),
    ("predict latest", "run 20260102-000000-000002 has no model.keras: it has not finished"),
    ("predict junk.keras -o a.xlsx", "--output a.xlsx ends in '.xlsx'"),
    ("predict junk.keras --want embeddings", "embeddings are the output of a layer"),
    ("predict junk.keras --layer pooled", "--layer is only used for embeddings"),
    ("predict junk.keras", "junk.keras is not a .keras file: it is not a zip archive"),
    ("report -q -v", "contradict"),
    ("report 2026", "2 runs begin with '2026'"),
    ("report --html /tmp", "--html /tmp is a directory"),
    ("runs rm", "received no run and no rule"),
    ("runs rm 20260101 -y", "received '20260101', expected date and time of a run"),
    ("runs rm latest", "Remove run 20260102-000000-000002? There is no terminal to answer on"),
    ("runs logs latest nope", "run 20260102-000000-000002 has no log 'nope'"),
    ("runs stop latest", "run 20260102-000000-000002 is not running"),
    ("train job.yaml extra", "got unexpected extra argument(s) (extra)"),
    ("train --cut dense", "--cut requires --strategy split, received --strategy auto"),
    ("doctor --mpi-timeout nan", "(env var: 'CSDCTL_MPI_TIMEOUT'): must be greater than or equal to 1"),
    ("train --silence-timeout 0", "--silence-timeout must be at least 1, received 0"),
    ("train --metrics nope", "received --metrics 'nope'"),
    ("train", "plans/job.yaml does not exist"),
    ("train --plan fleet.yaml", "fleet.yaml: key `job` is missing"),
    ("verify --plan nope.yaml", "nope.yaml does not exist"),
    ("train --plan plan.yaml --batch-size 8", "--plan and --batch-size"),
    ("train --resume latest --batch-size 8", "--resume and --batch-size"),
    ("train --strategy split --feature-precision float16", "--feature-precision float16"),
    ("train --strategy features --micro-batches 2", "--micro-batches 2"),
    ("train --resume nope", "no run 'nope' in"),
    ("train --resume latest", "manifest.json does not exist"),
    ("train --quite", "no such option: --quite. Did you mean --quiet?"),
    ("train --limit nope", "--limit 'nope' matches no node of fleet.yaml"),
    ("tune --batch-sizes 1,x", "invalid --batch-sizes '1,x'"),
    ("tune --probe-seconds -1", "--probe-seconds must be at least 0 and below 600, received -1.0"),
    ("tune --method stannis --max-global-batch 512", "stannis takes no limits, received max_global_batch"),
    ("tune --method stannis -C 0", "change --step-divisor"),
    ("tune -C 0", "fit does not take --batch-sizes, --step-divisor and --margin-scale"),
    ("scale --nodes x", "invalid --nodes 'x'"),
    ("train data", "cannot read data: it is a directory"),
    ("exec --limit 'csd[0-9]' -- true", "--limit 'csd[0-9]' names csd[4-9], not in fleet.yaml"),
    ("exec --limit 'csd[3-1]' -- true", "range [3-1] in 'csd[3-1]' is invalid"),
    ("exec --limit '' -- true", "--limit and --exclude leave no node of fleet.yaml"),
    ("exec -- ' '", "no command to run"),
    ("train --resume", "see `csdctl train --help`"),
    ("exec --task nope", "--task 'nope' is not FILE.py:TASK"),
    ("inventory -o fleet.yaml/x", "--output fleet.yaml/x: fleet.yaml is not a directory"),
    ("discover --ssh-config c --force --failed-from x", "--failed-from selects nodes of a fleet file"),
    ("trust --forget", "Delete the accepted keys of all nodes? There is no terminal to answer on"),
    ("discover --dry-run", "--dry-run and --force apply only when the fleet file is written"),
    ("forecast --node-watts 5", "energy requires --host-watts too"),
    ("provision --set nope", "--set 'nope' is not NAME=VALUE"),
    ("provision --collect --kind sparc", "--kind 'sparc' is unknown"),
    ("deploy data", "copy it with --tree data"),
    ("deploy --tree nope", "--tree nope: 'nope' does not exist"),
]
WITH_FILE = [
    ("m.py", BUILD, "init --model m.py --public .", "--model 'm.py' is not a valid reference"),
    ("m.py", BUILD, "init --model m.py:build", "missing --public"),
    ("m.py", BUILD, "init --model m.py:nope --public .", "--model: m.py has no function 'nope'"),
    ("a.txt", "x", "init a.txt", "a.txt: no call of model.fit"),
    ("n.ipynb", "{}", "init n.ipynb", "n.ipynb is a notebook, expected a script"),
    ("s.py", "x = (", "init s.py", "s.py, line 1: not valid Python: '(' was never closed"),
    ("s.py", "x = 1", "init s.py --model a:b", "SCRIPT excludes --model, --public, --validation and"),
    ("h", '{"_meta": 1', "discover --inventory h", "h cannot be read: not valid JSON: Expecting"),
    ("h", "", "discover --ssh-config h", "h has no Host line with a name"),
    ("m.py", BUILD, "init --model m.py:build --public m.py:", "does not name a function"),
]
"""The name and content of a file, command line, and a part of the message."""
BESIDE_PROJECT = [
    ("predictions.csv", "x", "predict junk.keras", "predictions.csv already exists"),
    ("x.json", "[]", FAILED_FROM, "x.json does not list the nodes that a command failed on"),
    ("hosts", INVENTORY, "discover --inventory hosts --force --limit nobody", "matches no node of hosts"),
    ("f.yaml", f"emulated: true\n{FLEET}", "provision --fleet f.yaml", "f.yaml is an emulated fleet"),
    ("hosts", INVENTORY, "discover --inventory hosts", "fleet.yaml already exists"),
]


WRONG: list[tuple[dict[str, str], str, str]] = [
    *(({}, *row) for row in WITHOUT_PROJECT),
    *((PROJECT, *row) for row in IN_PROJECT),
    *(({name: content}, *row) for name, content, *row in WITH_FILE),
    *((PROJECT | {name: content}, *row) for name, content, *row in BESIDE_PROJECT),
    *(
        (PROJECT, words, f"invalid value for '{OPTION.findall(words)[-1]}': {said}")
        for words, said in BAD_VALUES
    ),
    *(
        (PROJECT | {"j.yaml": JOB.replace(*change)}, "train j.yaml", f"j.yaml{said}")
        for *change, said in BAD_JOBS
    ),
    *(
        (PROJECT | {"f.yaml": FLEET.replace(*change)}, IN_FLEET, f"f.yaml{said}")
        for *change, said in BAD_FLEETS
    ),
]
SILENT = {
    "fleet.yaml": "nodes: [{name: 'csd[0-1]', address: '127.0.0.[1-2]', port: 9}]\n",
    "c": "Host csd0 csd1 csd2\nHostName 127.0.0.1\nPort 9\n",
}
RETRIED = (
    "exec -- true",
    "discover",
    "discover --ssh-config c --force --limit csd0,csd1",
    "trust",
    "doctor",
    "clean",
)
UNREACHABLE = (
    *RETRIED,
    "discover --cidr 127.0.0.0/30 --port 9 --force",
    "prepare",
    "tune",
    "train --batch-size 4",
    "train --batch-size 4 --dry-run",
    "verify",
    "scale --batch-size 4",
)
"""Command lines that need nodes, of which none answers."""


@pytest.mark.parametrize(("files", "words", "message"), WRONG, ids=[words for _, words, _ in WRONG])
def test_wrong_input_is_named(
    files: dict[str, str], words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files, tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    code, stderr = run(words)
    assert message in stderr
    assert "\n  → " in stderr, "no remedy"
    assert code == ExitCode.BAD_INPUT
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", UNREACHABLE)
def test_nodes_that_do_not_answer_are_exit_code_4(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(PROJECT | SILENT, tmp_path, monkeypatch)
    code, stderr = run(words)
    assert re.search(r"not reach csd0, csd1|no node of fleet.yaml can be reached|none of 2 addresses", stderr)
    assert code == ExitCode.UNREACHABLE
    assert "--ssh-config" not in stderr, "the fleet file has been written"
    if words in RETRIED:
        assert load_failed(Path(".csdctl/failed.json")) == "csd0,csd1"


@pytest.mark.parametrize("words", ["emulate status", "emulate down", "runs list"])
def test_what_is_absent_already_is_no_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({}, tmp_path, monkeypatch)
    assert run(words) == (ExitCode.DONE, "")


def write(files: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(content)
    (directory / ".csdctl").mkdir(exist_ok=True, mode=0o700)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory / "config"))
    monkeypatch.chdir(directory)


def run(words: str) -> tuple[int, str]:
    """Return the exit code, and what was written to standard error."""
    stderr = StringIO()
    code = run_command(shlex.split(words), Streams(StringIO(), stderr))
    text = stderr.getvalue()
    for leaked in ("Traceback", "Errno", "Value error", "instance of", "bug in csdctl", "<unknown>"):
        assert leaked not in text
    return code, text
