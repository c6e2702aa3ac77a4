# ruff: noqa: E501
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

PROJECT = {
    "fleet.yaml": "nodes: [{name: 'csd[0-3]', address: '192.0.2.[1-4]'}]\n",
    "data/a/b": "",
    "model.py": "def build():\n    import keras\n    return keras.Sequential([])\n",
    "job.yaml": "model: model.py:build\ndata: {public: {path: data}}\n"
    "recipe: {epochs: 1, learning_rate: 0.1}\n",
    "junk.keras": "junk",
    ".csdctl/runs/20260101-000000-000001/x": "",
    ".csdctl/runs/20260102-000000-000002/x": "",
}
EMPTY: dict[str, str] = {}
JUNK_MODEL = "model: junk.keras\ndata: {public: {path: data}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
WRONG: list[tuple[dict[str, str], str, str]] = [
    (EMPTY, "init --model nope.py:build --public data", "--public: data does not exist"),
    (EMPTY, "init --model nope.py:build --public .", "--model: nope.py does not exist"),
    (
        EMPTY | {"m.py": "def build(): pass\n"},
        "init --model m.py --public .",
        "--model 'm.py' is not a valid reference",
    ),
    (
        EMPTY | {"m.py": "def build(): pass\n"},
        "init --model m.py:build --public nope",
        "--public: nope does not exist",
    ),
    (EMPTY | {"m.py": "def build(): pass\n"}, "init --model m.py:build", "missing --public"),
    (EMPTY, "init", "missing a training SCRIPT, or --model and --public"),
    (
        EMPTY | {"m.py": "def build(): pass\n"},
        "init --model m.py:nope --public .",
        "--model: m.py has no function 'nope'",
    ),
    (EMPTY, "init nope.py", "nope.py does not exist"),
    (EMPTY | {"a.txt": "x"}, "init a.txt", "a.txt, line 1: no call of model.fit"),
    (
        EMPTY | {"s.py": "x = ("},
        "init s.py",
        "s.py, line 1: not valid Python: '(' was never closed",
    ),
    (EMPTY | {"s.py": "x = 1"}, "init s.py", "s.py, line 1: no call of model.fit"),
    (
        EMPTY | {"s.py": "x = 1"},
        "init s.py --model a:b",
        "SCRIPT excludes --model, --public and --validation",
    ),
    (
        EMPTY | {"s.py": "x = 1"},
        "init s.py -o nodir/job.yaml",
        "--output nodir/job.yaml: directory nodir does not exist",
    ),
    (EMPTY, "init --model keras.applications:Nope --public data", "--public: data does not exist"),
    (
        PROJECT,
        "init --model model.py:build --public data --model-args 7 --force",
        "--model-args:1: `model_args`: must be keys with values, such as {key: value} (received 7)",
    ),
    (
        PROJECT,
        "init --model model.py:build --public data --model-args '{' --force",
        "--model-args:1: not valid YAML: expected the node content, but found '<stre",
    ),
    (PROJECT, "predict latest", "run 20260102-000000-000002 has no model.keras: it has not finished"),
    (PROJECT, "predict junk.keras -o a.xlsx", "--output a.xlsx ends in '.xlsx'"),
    (
        PROJECT,
        "predict junk.keras --on nope",
        "invalid value for '--on': 'nope' is not one of 'private', 'public', 'valida",
    ),
    (
        PROJECT,
        "predict junk.keras --want nope",
        "invalid value for '--want': 'nope' is not one of 'classes', 'scores', 'embe",
    ),
    (PROJECT, "predict junk.keras -o nodir/a.csv", "--output nodir/a.csv: directory nodir does not exist"),
    (PROJECT | {"predictions.csv": "x"}, "predict junk.keras", "predictions.csv already exists"),
    (PROJECT, "report 2026", "2 runs begin with '2026'"),
    (PROJECT, "report --html /tmp", "--html /tmp is a directory"),
    (PROJECT, "report --html nodir/r.html", "--html nodir/r.html: directory nodir does not exist"),
    (PROJECT | {"r.html": "x"}, "report --html r.html", "r.html already exists"),
    (PROJECT, "report --csv .", "--csv . is a directory"),
    (PROJECT, "export --to nope", "invalid value for '--to': 'nope' is not one of 'tensorboard', 'mlflow'"),
    (PROJECT, "export", "missing option '--to'. Choose from:"),
    (PROJECT, "export --to mlflow --output x", "--output requires --to tensorboard"),
    (PROJECT, "export --to tensorboard --tracking-uri x", "--tracking-uri requires --to mlflow"),
    (PROJECT, "runs compare latest", "missing argument 'OTHER-RUN'"),
    (PROJECT, "runs rm", "missing argument 'RUN...'"),
    (PROJECT, "runs rm 2026 -y", "2 runs begin with '2026'"),
    (PROJECT, "runs rm latest", "Remove run 20260102-000000-000002? There is no terminal to answer on"),
    (PROJECT, "runs logs latest nope", "run 20260102-000000-000002 has no log 'nope'"),
    (PROJECT, "runs stop latest", "run 20260102-000000-000002 is not running"),
    (PROJECT, "runs stop --timeout -1", "invalid value for '--timeout': must be greater than or equal to 0"),
    (PROJECT, "runs lst", "no such command 'lst'. Did you mean 'list', 'ls'?"),
    (EMPTY, "trian", "no such command 'trian'. Did you mean 'train'?"),
    (EMPTY, "--nope", "no such option: --nope"),
    (EMPTY, "train job.yaml", "job.yaml does not exist"),
    (PROJECT, "train nope.yaml", "nope.yaml does not exist"),
    (PROJECT, "train job.yaml extra", "got unexpected extra argument(s) (extra)"),
    (PROJECT, "train --fleet nope.yaml", "nope.yaml does not exist"),
    (PROJECT, "train --batch-size 0", "invalid value for '--batch-size': must be greater than or equal to 1"),
    (
        PROJECT,
        "train --batch-size x",
        "invalid value for '--batch-size': must be a whole number (received 'x')",
    ),
    (PROJECT, "train --min-nodes -1", "invalid value for '--min-nodes': must be greater than or equal to 0"),
    (
        PROJECT,
        "train --strategy nope",
        "invalid value for '--strategy': 'nope' is not one of 'auto', 'data-parallel",
    ),
    (PROJECT, "train --cut dense", "--cut requires --strategy split, received --strategy auto"),
    (
        PROJECT,
        "train --collective ring",
        "invalid value for '--collective': 'ring' is not one of 'auto', 'star', 'all",
    ),
    (
        PROJECT,
        "doctor --mpi-timeout nan",
        "invalid value for '--mpi-timeout' (env var: 'CSDCTL_MPI_TIMEOUT'): must be greater than or equal to 1",
    ),
    (
        PROJECT,
        "doctor --timeout 0",
        "invalid value for '--timeout' (env var: 'CSDCTL_TIMEOUT'): must be greater than or equal to 1",
    ),
    (PROJECT, "train --silence-timeout 0", "--silence-timeout must be at least 1, received 0"),
    (PROJECT, "train --keep 0", "invalid value for '--keep': must be greater than or equal to 1"),
    (PROJECT, "train --checkpoint-seconds 0", "--checkpoint-seconds must be at least 1, received 0"),
    (PROJECT, "train --metrics nope", "received --metrics 'nope'"),
    (PROJECT, "train --callback nope", "received callback 'nope'"),
    (PROJECT, "train --callback nope.py:f", "the file of callback nope.py:f does not exist"),
    (PROJECT, "train", "there is no plan at"),
    (PROJECT, "train --plan nope.yaml", "there is no plan at nope.yaml"),
    (PROJECT, "train --plan data", "cannot read data: it is a directory"),
    (PROJECT, "train --plan fleet.yaml", "fleet.yaml: key `job` is missing"),
    (PROJECT, "train --plan fleet.yaml --dry-run", "fleet.yaml: key `job` is missing"),
    (PROJECT, "verify --plan nope.yaml", "there is no plan at nope.yaml"),
    (PROJECT, "train --resume nope", "no run 'nope' in"),
    (PROJECT, "train --resume latest", "manifest.json does not exist"),
    (PROJECT, "train --quite", "no such option: --quite. Did you mean --quiet?"),
    (PROJECT, "train --limit nope", "--limit 'nope' matches no node of fleet.yaml"),
    (
        PROJECT,
        "train --feature-precision float8",
        "invalid value for '--feature-precision': 'float8' is not one of 'float32',",
    ),
    (PROJECT, "tune --method nope", "invalid value for '--method': 'nope' is not one of 'fit', 'stannis'"),
    (PROJECT, "tune --cut x", "--cut requires --strategy split, received --strategy auto"),
    (PROJECT, "tune --batch-sizes 1,x", "invalid --batch-sizes '1,x'"),
    (PROJECT, "tune --probe-seconds -1", "--probe-seconds must be at least 0 and below 600, received -1.0"),
    (
        PROJECT,
        "tune --max-global-batch 0",
        "invalid value for '--max-global-batch': must be greater than or equal to 1",
    ),
    (PROJECT, "tune -C 0", "fit does not take --batch-sizes, -C and -E"),
    (PROJECT, "scale --nodes x", "invalid --nodes 'x'"),
    (
        PROJECT,
        "verify --batch-size -1",
        "invalid value for '--batch-size': must be greater than or equal to 1",
    ),
    (
        PROJECT,
        "train --feature-engine onnx",
        "invalid value for '--feature-engine': 'onnx' is not one of 'keras', 'litert",
    ),
    (PROJECT, "train .", "cannot read .: it is a directory"),
    (PROJECT, "train data", "cannot read data: it is a directory"),
    (PROJECT, "train --fleet .", "cannot read .: it is a directory"),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:nope\ndata: {public: {path: data}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml: model.py has no function 'nope'",
    ),
    (
        PROJECT | {"j.yaml": "model: model.py:build\ndata: 7\nrecipe: {epochs: 1, learning_rate: 0.1}"},
        "train j.yaml",
        "j.yaml:2: `data`: must have keys such as public, private, validation (recei",
    ),
    (
        PROJECT
        | {"j.yaml": "model: model.py:build\ndata: {public: 7}\nrecipe: {epochs: 1, learning_rate: 0.1}"},
        "train j.yaml",
        "j.yaml:2: `data.public`: must have keys such as path, on, function (receive",
    ),
    (
        PROJECT | {"j.yaml": "model: model.py:build\ndata: {public: {path: data}}\nrecipe: 7"},
        "train j.yaml",
        "j.yaml:3: `recipe`: must have keys such as epochs, learning_rate, schedule",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epochs: many, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml:3: `recipe.epochs`: must be a whole number (received 'many')",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epochs: 0, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml:3: `recipe.epochs`: must be greater than or equal to 1 (received 0)",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epoch: 1, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml:3: key `recipe.epochs` is missing",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}}\nrecipe: {epochs: 1, learning_rate: -1}"
        },
        "train j.yaml",
        "j.yaml:3: `recipe.learning_rate`: must be greater than 0 (received -1)",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}, private: {path: ../x}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml: data.private.path ../x contains `..`",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data}, private: {path: data}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml: data.private.path data and data.public.path data overlap",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ndata: {public: {path: data, on: nodes}}\nrecipe: {epochs: 1, learning_rate: 0.1}"
        },
        "train j.yaml",
        "j.yaml:2: `data.public.on`: must be 'host' or 'every-node' (received 'nodes",
    ),
    (
        PROJECT | {"j.yaml": "model: model.py:build\ndata: {public: {path: data}}"},
        "train j.yaml",
        "j.yaml: key `recipe` is missing",
    ),
    (
        PROJECT | {"j.yaml": "- 1"},
        "train j.yaml",
        "j.yaml: expected keys such as model, data, recipe, received a list",
    ),
    (
        PROJECT | {"j.yaml": ""},
        "train j.yaml",
        "j.yaml: expected keys such as model, data, recipe, received an empty file",
    ),
    (
        PROJECT | {"j.yaml": "model: ["},
        "train j.yaml",
        "j.yaml:1: not valid YAML: expected the node content, but found '<stream end",
    ),
    (
        PROJECT | {"j.yaml": "model: a\nmodel: b"},
        "train j.yaml",
        "j.yaml:2: not valid YAML: duplicate key `model`",
    ),
    (
        PROJECT | {"j.yaml": "\tmodel: a"},
        "train j.yaml",
        "j.yaml:1: not valid YAML: found character '\\t' that cannot start any token",
    ),
    (
        PROJECT | {"j.yaml": "model: nope\ndata: {public: {path: data}}\nrecipe: {epochs: 1}"},
        "train j.yaml",
        "j.yaml: model 'nope' is not a valid reference",
    ),
    (
        PROJECT
        | {
            "j.yaml": "model: model.py:build\ncode: [nope.py]\ndata: {public: {path: data}}\nrecipe: {epochs: 1}"
        },
        "train j.yaml",
        "j.yaml: code 'nope.py' is neither a .py file nor a directory with .py files",
    ),
    (
        PROJECT
        | {"j.yaml": "model: model.py:build\ndata: {public: {path: data, function: f}}\nrecipe: {epochs: 1}"},
        "train j.yaml",
        "j.yaml: function 'f' is not a valid reference",
    ),
    (
        PROJECT | {"f.yaml": "nodes: 7"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes`: must be a list (received 7)",
    ),
    (PROJECT | {"f.yaml": "nodes: []"}, "exec --fleet f.yaml -- true", "f.yaml: the fleet is empty"),
    (
        PROJECT | {"f.yaml": "nodes: [7]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0`: must have keys such as name, address, port (received 7)",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: key `nodes.0.address` is missing",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: 'a b', address: 1.1.1.1}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0.name`: not a valid name (letters, digits, '.', '_', '-')",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: 'a[0-2]', address: '1.1.1.[1-2]'}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0`: name 'a[0-2]' expands to 3 nodes, but address '1.1.1.[",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1},{name: a, address: 1.1.1.2}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml: two nodes have the name 'a'",
    ),
    (
        PROJECT | {"f.yaml": "network: 10.0.0.0/99\nnodes: [{name: a, address: 1.1.1.1}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `network`: '10.0.0.0/99' does not appear to be an IPv4 or IPv6 ne",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, port: ssh}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0.port`: must be a whole number (received 'ssh')",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, port: 99999}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0.port`: must be less than or equal to 65535 (received 999",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, usr: x}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: unknown key `nodes.0.usr`, did you mean `user`?",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, jump: a}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml: cyclic jumps: a → a",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, power: nope}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0.power.source`: must be 'rapl', 'ipmi', 'hwmon', 'csv' or",
    ),
    (
        PROJECT | {"f.yaml": "nodes: [{name: a, address: 1.1.1.1, power: {source: constant}}]"},
        "exec --fleet f.yaml -- true",
        "f.yaml:1: `nodes.0.power`: source constant needs `watts`",
    ),
    (
        PROJECT | {"x.json": "[]"},
        "exec --failed-from x.json -- true",
        "x.json does not list the nodes that a command failed on",
    ),
    (
        PROJECT | {"x.json": "{"},
        "exec --failed-from x.json -- true",
        "x.json cannot be read: not valid JSON: Expecting property name enclosed in double quotes",
    ),
    (PROJECT, "exec --limit 'csd[0-9]' -- true", "--limit 'csd[0-9]' names csd[4-9], not in fleet.yaml"),
    (PROJECT, "exec --limit 'csd[3-1]' -- true", "range [3-1] in 'csd[3-1]' is invalid"),
    (PROJECT, "exec --limit '' -- true", "--limit and --exclude leave no node of fleet.yaml"),
    (PROJECT, "exec", "no command to run"),
    (PROJECT, "exec --task nope", "--task 'nope' is not FILE.py:TASK"),
    (
        PROJECT,
        "exec --timeout -1 -- true",
        "invalid value for '--timeout': must be greater than or equal to 0.001",
    ),
    (PROJECT, "inventory -o nodir/x", "--output nodir/x: directory nodir does not exist"),
    (PROJECT | {"hosts": "x"}, "inventory -o hosts", "hosts already exists"),
    (PROJECT, "inventory -o .", "--output . is a directory"),
    (
        PROJECT,
        "inventory --format yaml",
        "invalid value for '--format': 'yaml' is not one of 'ansible', 'json', 'ssh-",
    ),
    (PROJECT, "inventory -o fleet.yaml/x", "--output fleet.yaml/x: fleet.yaml is not a directory"),
    (PROJECT, "discover --cidr 10.0.0.0/33", "'10.0.0.0/33' is not an address range"),
    (EMPTY, "discover --cidr 10.0.0.0/4", "10.0.0.0/4 has 268435456 addresses, but at most 4096 are scanned"),
    (EMPTY, "discover --cidr nope", "'nope' is not an address range"),
    (EMPTY, "discover --cidr 10.0.0.0/30 --user 'a b'", "--user 'a b' is not a user name"),
    (EMPTY, "discover --cidr 10.0.0.0/30 --key /nope", "--key /nope does not exist"),
    (
        EMPTY,
        "discover --cidr 10.0.0.0/30 --port 0",
        "invalid value for '--port': must be greater than or equal to 1",
    ),
    (EMPTY, "discover --user x", "--user applies only to machines that --cidr finds"),
    (PROJECT, "discover --dry-run", "--dry-run and --force apply only when the fleet file is written"),
    (
        EMPTY,
        "discover --cidr 10.0.0.0/30 --inventory x",
        "a fleet file is written from one source, received 2",
    ),
    (EMPTY, "discover --inventory nope", "nope does not exist"),
    (
        EMPTY | {"h": "junk"},
        "discover --inventory h",
        "h cannot be read: not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    (EMPTY, "discover --ssh-config nope", "nope does not exist"),
    (EMPTY | {"h": ""}, "discover --ssh-config h", "h has no Host line with a name"),
    (EMPTY, "discover", "fleet.yaml does not exist"),
    (
        PROJECT,
        "forecast nope.yaml --published mobilenetv2",
        "received both job nope.yaml and --published mobilenetv2",
    ),
    (
        PROJECT,
        "forecast --published nope",
        "invalid value for '--published': 'nope' is not one of 'mobilenetv2', 'nasne",
    ),
    (PROJECT, "forecast --published mobilenetv2 --max-global-batch 8", "the paper's batch sizes are fixed"),
    (EMPTY, "forecast", "job.yaml does not exist"),
    (
        PROJECT,
        "forecast --published mobilenetv2 --host-watts -5",
        "invalid value for '--host-watts': must be greater than or equal to 0",
    ),
    (PROJECT, "forecast --published mobilenetv2 --node-watts 5", "energy requires --host-watts too"),
    (PROJECT, "forecast --published mobilenetv2 --nodes 5..1", "invalid --nodes '5..1'"),
    (
        PROJECT,
        "forecast --published mobilenetv2 --epochs 0",
        "invalid value for '--epochs': must be greater than or equal to 1",
    ),
    (
        PROJECT,
        "forecast --published mobilenetv2 --sum-seconds nan",
        "invalid value for '--sum-seconds': must be greater than or equal to 0",
    ),
    (EMPTY, "emulate up --nodes 0", "invalid value for '--nodes': must be greater than or equal to 1"),
    (
        EMPTY,
        "emulate up --memory lots",
        "received 'lots' as a size, expected a number and a unit such as 512M or 2G",
    ),
    (
        EMPTY,
        "emulate up --memory 1K",
        "received 1,024 bytes as the memory of a node, expected at least 16M",
    ),
    (
        EMPTY,
        "emulate up --cpu 0",
        "received 0 as the CPU share of a node, expected 0.01 to",
    ),
    (
        EMPTY,
        "emulate up --cpu-mechanism nope",
        "invalid value for '--cpu-mechanism' (env var: 'CSDCTL_EMULATED_CPU_MECHANIS",
    ),
    (
        EMPTY,
        "emulate up --pid 99999999",
        "received 99999999 as the process that the emulated fleet ends with, expecte",
    ),
    (EMPTY, "emulate stop", "no such command 'stop'"),
    (PROJECT, "provision --set nope", "--set 'nope' is not NAME=VALUE"),
    (PROJECT, "provision --collect --kind sparc", "--kind 'sparc' is unknown"),
    (PROJECT, "deploy nope.yaml", "nope.yaml does not exist"),
    (PROJECT, "deploy --tree nope", "--tree nope: 'nope' does not exist"),
]
"""Files, command line, and a part of the message."""
SILENT = {"fleet.yaml": "nodes: [{name: 'csd[0-1]', address: '127.0.0.[1-2]', port: 9}]\n"}
UNREACHABLE = (
    "exec -- true",
    "discover",
    "discover --cidr 127.0.0.0/30 --port 9 --force",
    "trust",
    "doctor",
    "clean",
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
    code, shown = run(words)
    assert message in shown
    assert "\n  → " in shown, "no remedy"
    assert code == ExitCode.BAD_INPUT
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", UNREACHABLE)
def test_nodes_that_do_not_answer_are_exit_code_4(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(PROJECT | SILENT, tmp_path, monkeypatch)
    code, shown = run(words)
    assert re.search(r"no node of fleet.yaml can be reached|none of 2 (nodes|addresses)", shown)
    assert code == ExitCode.UNREACHABLE


@pytest.mark.parametrize("words", ["emulate status", "emulate down", "runs list"])
def test_what_is_absent_already_is_no_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(EMPTY, tmp_path, monkeypatch)
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
    shown = stderr.getvalue()
    for leaked in ("Traceback", "Errno", "Value error", "instance of", "bug in csdctl", "<unknown>"):
        assert leaked not in shown
    return code, shown
