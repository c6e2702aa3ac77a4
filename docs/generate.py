"""Writes the pages of docs/reference/ that follow from others: attacks, cli, decisions, faults, json, python.

    python docs/generate.py

`make check` compares them with what is committed. They come from the command tree, from signatures, from the
annotations and docstrings of dataclasses, and from the markers of tests: change those instead.
"""

import ast
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, get_type_hints

import typer
import yaml

import csdctl
from csdctl import errors
from csdctl.cli.app import app
from csdctl.emulation.fleet import NodeStatus
from csdctl.fleet.checks import Check
from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.model import Node, Problem
from csdctl.launch.leftovers import Leftovers
from csdctl.reporting.energy import RunEnergy
from csdctl.reporting.privacy import Privacy
from csdctl.reporting.results import RankSummary, RunStatus, RunSummary
from csdctl.reporting.tables import ScalingPoint
from csdctl.shipping.deliver import Delivery
from csdctl.supervision import event_callbacks
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol import events
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.discovery.discover import DiscoverResult
from csdctl.workflows.predict.predict import PredictResult
from csdctl.workflows.provision.bundle import Bundle
from csdctl.workflows.reporting.report import PrivacyReport
from csdctl.workflows.train.verify import Verification

REFERENCE = Path(__file__).parent / "reference"

# ---- json.md ----

JSON_HEADER = """\
# JSON documents

With `--json`, a command prints one document to standard output, and everything else to standard error.
`csdctl train` prints lines: a document each. `schema` names the kind and its version: the number rises when a
field is removed or changes its meaning; fields may be added without that. Units are in the names: `_s`
seconds, `_bytes` bytes.
"""
MEANINGS = {
    "command": "The command that failed.",
    "cut": "For `split`: the last layer that nodes compute.",
    "elapsed_s": "Seconds.",
    "emulated": "Whether the fleet is emulated.",
    "exit_code": "The exit code of the process.",
    "failed": "Machines that failed: message and remedy by name.",
    "files": "Paths of the files that were written.",
    "fleet": "Path of the fleet file.",
    "global_batch": "Samples of all ranks in one step.",
    "is_dry_run": "Whether nothing was changed.",
    "job": "Path or name of the job.",
    "message": "What was received, and what was expected.",
    "num_computed": "Samples that were computed now; the others were known.",
    "num_samples": "Samples of an epoch; null: unknown.",
    "owner_pid": "The process that the fleet ends with.",
    "path": "Path of the file or directory.",
    "ranks": "Each rank.",
    "reason": "Why a run ended before its last epoch.",
    "remedy": "What to do; may be empty.",
    "run": "Id of the run.",
    "run_id": "Id of the run.",
    "samples_per_s": "Throughput.",
    "state": "completed, stopped, failed, or interrupted for a run without an end; running.",
    "strategy": "data-parallel, features or split.",
}
"""Of fields without a docstring."""


@dataclass(frozen=True)
class Shown:
    """A document: where it is printed, the types of its fields, and those that may be absent."""

    where: str
    fields: Mapping[str, Any]
    meanings: Mapping[str, str]
    optional: frozenset[str] = frozenset()


def shown(
    where: str, *bases: Any, without: Collection[str] = (), optional: Collection[str] = (), **fields: Any
) -> Shown:
    """Describe a document with the fields of `bases` and others: a type, or a type and its meaning."""
    kinds: dict[str, Any] = {}
    meanings: dict[str, str] = {}
    for base in bases:
        for name, (kind, meaning) in fields_of(base).items():
            if name not in without:
                kinds[name], meanings[name] = kind, meaning
    for name, given in fields.items():
        kinds[name], meanings[name] = given if type(given) is tuple else (given, "")
    return Shown(where, kinds, meanings, frozenset(optional))


def fields_of(found: Any) -> dict[str, tuple[Any, str]]:
    """Return type and docstring of each field of a dataclass or a model of pydantic."""
    hints: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for one in reversed(found.__mro__):
        if one.__module__.startswith("csdctl."):
            hints |= get_type_hints(one)
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            assert isinstance(definition, ast.ClassDef)
            texts |= {name: text for name, _, text in _attributes(definition.body)}
    if dataclasses.is_dataclass(found):
        names = [field.name for field in dataclasses.fields(found)]
    else:
        names = list(found.model_fields)
    fields = {name: (hints[name], texts.get(name, "")) for name in names}
    for name in getattr(found, "JSON_PROPERTIES", ()):
        computed = getattr(found, name)
        fields[name] = get_type_hints(computed.fget)["return"], _docstring(computed)
    return fields


def _attributes(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yield each annotated public name, ` = ` and its default, and the docstring that follows it."""
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text, name = "", statement.target.id
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        default = f" = {statement.value.value!r}" if isinstance(statement.value, ast.Constant) else ""
        if not name.startswith("_"):
            yield name, default, text


FAILED = dict[str, Any]
DOCUMENTS = {
    "csdctl.bundle/1": shown(
        "No command prints it: it is `bundle.json` of each bundle that `csdctl provision` has collected.",
        Bundle,
        without=["directory"],
    ),
    "csdctl.bundles/1": shown(
        "`csdctl provision --collect`",
        bundles=(list, "Each kind of node: id, kind, directory, bytes to send and needed there, files."),
    ),
    "csdctl.clean/1": shown(
        "`csdctl clean`", is_dry_run=bool, machines=(dict[str, Leftovers], "By machine."), failed=FAILED
    ),
    "csdctl.deploy/1": shown(
        "`csdctl deploy`", is_dry_run=bool, machines=(dict[str, Delivery], "By node."), failed=FAILED
    ),
    "csdctl.discover/1": shown(
        "`csdctl discover`",
        fleet=Path,
        emulated=bool,
        machines=(list[Facts], "Each machine; `remedy` says what to do if it failed."),
        groups=(list, "Equal machines: names, the same as ranges, and how they differ from the others."),
        problems=(list[Problem], "Causes, with the machines that have them."),
        drives=(dict[str, Drive], "The host's drive of each node, where it is known."),
        warnings=(list[str], "Text."),
        failed=FAILED,
    ),
    "csdctl.doctor/1": shown(
        "`csdctl doctor`",
        fleet=Path,
        emulated=bool,
        is_fit=(bool, "Whether the machines can train together."),
        overdue=(str | None, "What was unfinished at the deadline."),
        checks=(list[Check], "Each check of each machine."),
        failed=FAILED,
    ),
    "csdctl.emulate/1": shown(
        "`csdctl emulate up`, `status` and `down`",
        fleet_path=(Path, "The fleet file."),
        was_up=(bool, "Whether it was running before."),
        owner_pid=(int | None, "The process whose end ends it."),
        emulated=(bool, "True."),
        nodes=(list[NodeStatus], "Each node; none after `down`."),
        num_processes=(int, "Processes that `down` ended."),
        optional=["fleet_path", "was_up", "owner_pid", "num_processes"],
    ),
    "csdctl.error/1": shown(
        "Every command that fails, unless its own document says so already; `train` and `runs watch`, as the "
        "last line",
        node=(str, "The machine; empty if no machine is concerned."),
        message=str,
        remedy=str,
        exit_code=int,
    ),
    "csdctl.exec/1": shown(
        "`csdctl exec`",
        fleet=Path,
        emulated=bool,
        task=(str | None, "The Fabric task."),
        command=(list[str], "The command, or the arguments of the task."),
        rows=(list, "Each different answer, with the machines that gave it as ranges."),
        machines=(list, "Each machine: exit code, the index of its row, seconds."),
        failed=FAILED,
    ),
    "csdctl.failed/1": shown(
        "The file `.csdctl/failed.json`, for `--failed-from`", command=str, failed=FAILED
    ),
    "csdctl.forecast/1": shown(
        "`csdctl forecast`",
        title=(str, "What the forecast is for."),
        source=(str, "The source of its figures."),
        origins=(dict[str, str], "Whether each figure was measured or assumed."),
        epochs=(int, "Epochs."),
        num_samples=int | None,
        power=(dict | None, "The power that was assumed."),
        curve=(list, "Throughput with its range, time and energy by number of nodes."),
        verdict=(dict | None, "Whether nodes are worth it, and why not."),
    ),
    "csdctl.init/1": shown(
        "`csdctl init`",
        path=Path,
        model=(ModelInfo, "The model's inputs and outputs."),
        public=(DataLook, "Summary of the public data."),
        validation=(DataLook | None, "Summary of the validation data."),
        notes=(list, "Parts of the script that were not converted, by line."),
        fits=(bool, "Whether model and data fit together."),
        next=(list[str], "Commands that come next."),
        problem=(dict | None, "Message and remedy where they do not fit."),
    ),
    "csdctl.inventory/1": shown(
        "`csdctl inventory --format json`",
        fleet=Path,
        network=(str, "The network for MPI, as CIDR."),
        emulated=bool,
        nodes=(list[Node], "The nodes as the fleet file lists them."),
    ),
    "csdctl.predict/1": shown(
        "`csdctl predict`",
        PredictResult,
        without=["missing"],
        model=(str, "Path of the model."),
        on=(list[str], "The data sets."),
        want=(str, "As `--want`."),
        layer=(str, "As `--layer`."),
        failed=FAILED,
    ),
    "csdctl.prepare/1": shown(
        "`csdctl prepare`",
        public=(DatasetInfo, "The public data set."),
        validation=(DatasetInfo | None, "The validation data set."),
        private=(dict, "Counts of private samples by node, no names."),
        model=(ModelInfo, "The model's inputs, outputs and parameters."),
    ),
    "csdctl.privacy/1": shown(
        "`csdctl report --privacy`",
        PrivacyReport,
        promise=(str, "What never leaves a machine."),
        remarks=(dict[str, str], "What the bytes of each class may reveal."),
    ),
    "csdctl.provision/1": shown(
        "`csdctl provision`",
        is_dry_run=bool,
        prefix=(str, "Installation directory."),
        nodes=(dict, "By node: architecture, what was sent, and Ansible's counts of tasks, or null."),
        failed=FAILED,
    ),
    "csdctl.report-files/1": shown("`csdctl report` with `--html` or `--csv`", files=list[str]),
    "csdctl.report/1": shown("`csdctl report`, and `csdctl train` as the last line", RunSummary, path=str),
    "csdctl.reports/1": shown(
        "`csdctl report` for several runs", runs=(list, "A `csdctl.report/1` document for each.")
    ),
    "csdctl.runs.rm/1": shown("`csdctl runs rm`", run=str, runs=(list[str], "All runs that were removed.")),
    "csdctl.runs.stop/1": shown("`csdctl runs stop`", RunStatus),
    "csdctl.runs/1": shown("`csdctl runs list`", runs=(list[RunStatus], "Each run, the oldest first.")),
    "csdctl.scale/1": shown(
        "`csdctl scale --dry-run`",
        points=(list, "Each point: series, nodes, batch sizes, and its run unless it would be trained."),
    ),
    "csdctl.scaling/1": shown(
        "`csdctl scale`, one line for each series, after its trainings",
        origin=(str, "Whether measured, and on what kind of fleet."),
        kind=(str, "Strong or weak scaling."),
        host_samples_per_s=(float | None, "The rate of the host alone."),
        host_source=(str, "Its source."),
        points=(list[ScalingPoint], "Each run; energy in joules per sample."),
    ),
    "csdctl.train.dry-run/1": shown(
        "`csdctl train --dry-run`",
        resume=(str | None, "The run that would be resumed."),
        strategy=str,
        cut=str,
        num_samples=int | None,
        plan=(dict, "The plan as `csdctl.tune/1`."),
    ),
    "csdctl.train/1": shown(
        "`csdctl train` as its first line; lines with events follow, the last line is `csdctl.report/1`",
        run=(str, "Id of the run; absent if, with `--detach`, nothing was left to train."),
        path=str,
        detached=(bool, "Whether the run goes on in the background."),
        optional=["run", "path", "detached"],
    ),
    "csdctl.trust/1": shown(
        "`csdctl trust`; with `--forget` it has `forgotten` instead of `machines` and `failed`",
        is_dry_run=bool,
        machines=(dict, "Host keys by machine; `state` is `known` or `new`."),
        failed=FAILED,
        forgotten=(dict[str, int], "Deleted keys by node."),
        optional=["machines", "failed", "forgotten"],
    ),
    "csdctl.tune/1": shown(
        "`csdctl tune`; the file of the plan has the same without `path` and the next three fields",
        Plan,
        path=str,
        global_batch=int,
        predicted_samples_per_s=(float | None, "As the plan predicts."),
        predicted_range=(list | None, "9 of 10 runs are expected between these samples/s."),
    ),
    "csdctl.verify/1": shown(
        "`csdctl verify`",
        events.Verified,
        without=["rank", "node", "differences", "batch_sizes"],
        global_batch=int,
        emulated=bool,
        is_equal=(bool, "Whether the fleet takes the step that Keras takes of the same samples."),
        verdict=(str, "The same in words."),
        ranks=(dict, "By machine: `batch_size`, and `difference`, the distance of its gradient to Keras'."),
    ),
}
"""By schema, in alphabetical order."""


def render_json() -> str:
    """Return the page of all documents, and of the dataclasses in them."""
    parts = [JSON_HEADER]
    nested: dict[str, Any] = {}
    for schema, document in sorted(DOCUMENTS.items()):
        parts.append(f"## {schema}\n\n{document.where.rstrip('.')}.")
        rows = {name: (kind, document.meanings.get(name, "")) for name, kind in document.fields.items()}
        parts.append(_field_table(rows, nested, document.optional))
    parts.append("## Objects in them")
    done: set[str] = set()
    while left := sorted(nested.keys() - done):
        for name in left:
            done.add(name)
            parts.append(f"### {name}\n\n{_docstring(nested[name])}")
            parts.append(_field_table(fields_of(nested[name]), nested))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _field_table(
    rows: Mapping[str, tuple[Any, str]], nested: dict[str, Any], optional: Collection[str] = ()
) -> str:
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for name, (kind, meaning) in rows.items():
        absent = ", may be absent" if name in optional else ""
        text = _cell(meaning or MEANINGS.get(name, ""))
        lines.append(f"| `{name}` | {_describe(kind, nested)}{absent} | {text} |")
    return "\n".join(lines)


def json_types(kind: Any) -> tuple[type, ...]:
    """Return what `json.loads` returns for values of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return json_types(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(one for argument in arguments for one in json_types(argument))
    if origin is typing.Literal:
        return json_types(type(arguments[0]))
    if kind in (None, types.NoneType):
        return (types.NoneType,)
    found = origin or kind
    if found in (Any, object):
        return (object,)
    if issubclass(found, bool):
        return (bool,)
    if issubclass(found, int | float) and not issubclass(found, enum.StrEnum):
        return (int, float)
    if issubclass(found, str | PurePath):
        return (str,)
    return (list,) if issubclass(found, Sequence | set) else (dict,)


def _describe(kind: Any, nested: dict[str, Any]) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _describe(arguments[0], nested)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(one, nested) for one in arguments))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"):
        nested[kind.__name__] = kind
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    names = {bool: "bool", int: "number", str: "text", list: "list", dict: "object", types.NoneType: "null"}
    found = json_types(kind)[0]
    if found is list and arguments and arguments[0] is not Ellipsis:
        return f"list of {_describe(arguments[0], nested)}"
    if found is dict and len(arguments) == 2 and arguments[1] is not Any:
        return f"object by name of {_describe(arguments[1], nested)}"
    return names.get(found, "any")


# ---- cli.md ----

CLI_HEADER = """\
# Command line

See also: [exit codes](exit-codes.md), [file formats](files.md).

`csdctl --install-completion` sets up completion for the shell that runs it: bash, zsh or fish. Open a new
shell afterwards. It completes commands, options and their values, nodes, runs and models.
`csdctl --show-completion` prints the script instead.
"""


def list_commands(app: typer.Typer) -> list[tuple[str, Any]]:
    """Return every command and group with its full name (`csdctl emulate up`), in the order of the help."""
    root = typer.main.get_command(app)
    return list(_walk(str(root.name), root))


def render_cli() -> str:
    """Return the page of the commands; it does not depend on the terminal."""
    return "\n".join([CLI_HEADER, *(_render_command(name, command) for name, command in list_commands(app))])


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child in _children(command):
        yield from _walk(f"{name} {child.name}", child)


def _children(command: Any) -> list[Any]:
    """Return the commands of a group, none for a command."""
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return [command.get_command(None, name) for name in names]


def _render_command(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=name, help_option_names=["-h", "--help"])  # it is kept
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    if children := _children(command):
        rows = [
            (f"[`{child.name}`](#{name} {child.name})".lower().replace(" ", "-"), child.help)
            for child in children
        ]
        parts.append(_option_table("command", rows))
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [(f"`{name}`", text) for name, text in filter(None, records)]
    parts.append(_option_table("argument or option", rows))
    return "\n\n".join([*parts, *([command.epilog] if command.epilog else [])]) + "\n"


def _option_table(heading: str, rows: Sequence[tuple[str, str | None]]) -> str:
    lines = [f"| {heading} | meaning |", "|---|---|"]
    for name, text in rows:
        paragraph = " ".join((text or "").split("\n\n")[0].split())
        lines.append(f"| {_cell(name)} | {_cell(paragraph)} |")
    return "\n".join(lines)


# ---- python.md ----

PYTHON_HEADER = """\
# Python

`import csdctl` loads nothing else; what it offers is loaded when it is used, without TensorFlow. It needs
Linux. The functions do what the commands of the [command line](cli.md) do, in the current directory, and
share their files. Output is that of the commands, as plain lines, also in a notebook.
[A notebook](../tutorials/notebook.md) shows it all.
"""
ERRORS = """\
## Errors

`csdctl.errors` has all errors. Each has `message`, `remedy` (what to do, or ''), `node` (where, or '') and
`exit_code`, with which the command line [ends](exit-codes.md); `str(error)` contains all of these. Ctrl-C, or
*Interrupt* in a notebook, raises KeyboardInterrupt, once everything that runs on the machines was stopped;
during training it is a `csdctl.RunStopped`.
"""
EVENTS = """\
## Events

What [a callback](../how-to/follow-a-run.md) gets, what `csdctl train --json` prints and what `events.jsonl`
keeps has `event`, the name of its type, `rank` and `node`, and these fields. A callback also gets `run`, the
id of the run, and `time`, in seconds since 1970. Types that are not listed here may change.
"""
SHOWN_EVENTS = (
    events.Ready,
    events.Joined,
    events.Progress,
    events.EpochEnd,
    events.Evaluating,
    events.CheckpointSaved,
    events.Rebalanced,
    events.WaitingFor,
    events.NodeLost,
    events.NodeBack,
    events.Warned,
    events.Finished,
    events.Failed,
)
RESULTS = (RunSummary, RankSummary, RunEnergy, Privacy, DiscoverResult, Verification)


def render_python() -> str:
    """Return the page of the Python interface."""
    names = [name for name in csdctl.__all__ if not name.startswith("__")]
    found = {name: getattr(csdctl, name) for name in names}
    functions = [
        f"### csdctl.{name}\n\n{_call(name, one)}" for name, one in found.items() if inspect.isfunction(one)
    ]
    classes = [
        _class(f"csdctl.{name}", one)
        for name, one in found.items()
        if inspect.isclass(one) and name != "CsdctlError"
    ]
    source = ast.parse(inspect.getsource(event_callbacks))
    stop = next(text for name, _, text in _attributes(source.body) if name == "STOP")
    rows = [
        f"| `{name}` | {int(error.exit_code)} | {_cell(_docstring(error).splitlines()[0])} |"
        for name, error in vars(errors).items()
        if inspect.isclass(error) and issubclass(error, errors.CsdctlError)
    ]
    parts = [PYTHON_HEADER, "## Functions", *functions, "## Classes", *classes]
    parts += ["## Constants", f"- `csdctl.STOP`: {stop}"]
    parts += ["## Results", *(_class(result.__name__, result) for result in RESULTS)]
    parts += [EVENTS, *(_class(event.__name__, event) for event in SHOWN_EVENTS)]
    parts += [ERRORS, "\n".join(["| error | exit code | what happened |", "|---|---|---|", *rows])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _call(name: str, function: Any) -> str:
    found = inspect.signature(function)
    parameters = [
        one.replace(annotation=one.empty)
        for one in found.parameters.values()
        if one.name not in ("self", "cls")
    ]
    signature = found.replace(parameters=parameters, return_annotation=found.empty)
    return f"```text\n{name}{signature}\n```\n\n{_docstring(function)}"


def _class(title: str, found: type) -> str:
    parts = [f"### {title}", _docstring(found)]
    hints = get_type_hints(found)
    rows = [
        f"| `{name}` | `{_cell(_type(hints[name]))}{default}` | {_cell(text)} |"
        for part in reversed(found.__mro__)
        if part.__name__ == found.__name__  # options in Python inherit from those of the workflow
        for name, default, text in _attributes(_body_of(part))
    ]
    if rows:
        parts.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]))
    for name, member in vars(found).items():
        if name.startswith("_") or not _docstring(member):
            continue
        if isinstance(member, property):
            parts.append(f"`.{name}`: {_docstring(member)}")
        elif isinstance(member, classmethod):
            parts.append(_call(f"{title}.{name}", member.__func__))
        elif inspect.isfunction(member):
            parts.append(_call(f".{name}", member))
    return "\n\n".join(parts)


def _body_of(found: type) -> list[ast.stmt]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _docstring(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")


def _type(found: Any) -> str:
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", inspect.formatannotation(found))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- faults.md, attacks.md ----

TESTS = Path(__file__).parents[1] / "tests"
FAULTS_HEADER = """\
# Faults

What csdctl does when something fails. Every message names the node, the cause and a remedy. No process is
left running. `tests/lab` uses OpenSSH servers in network namespaces. Exit codes other than 0 are in
parentheses; 3/4 is 3 if other nodes continued, else 4.
"""
ATTACKS_HEADER = """\
# Attacks

Each attack is made by tests with real processes, sockets and SSH servers.
[Security](../explanation/security.md) has the threat model. Failures without an attacker are in
[faults](faults.md).
"""


def tests_with(marker: str) -> dict[int, list[str]]:
    """Return the tests that carry a number in `pytest.mark.MARKER`, as FILE::TEST, by number."""
    tests: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if f"mark.{marker}(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{marker}":
                    number = ast.literal_eval(decorator.args[0])
                    tests[number].append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return tests


def render_faults() -> str:
    """Return faults.md: the faults of tests/faults.yaml with their tests."""
    parts, tests = [FAULTS_HEADER], tests_with("fault")
    for section, faults in yaml.safe_load((TESTS / "faults.yaml").read_text()).items():
        parts.append(f"\n## {section}\n\n| no. | fault | result | tests |\n|---|---|---|---|\n")
        for number, entry in faults.items():
            listed = ", ".join(f"`{name}`" for name in tests[number])
            parts.append(f"| {number} | {entry['fault']} | {entry['result']} | {listed} |\n")
    return "".join(parts)


def render_attacks() -> str:
    """Return attacks.md: the attacks of tests/attacks.yaml with the files of their tests."""
    parts, tests = [ATTACKS_HEADER], tests_with("attack")
    parts.append("\n| no. | attack | what csdctl does | tests |\n|---|---|---|---|\n")
    for number, entry in yaml.safe_load((TESTS / "attacks.yaml").read_text()).items():
        files = dict.fromkeys(name.partition("::")[0] for name in tests[number])
        listed = ", ".join(f"`{name}`" for name in files)
        parts.append(f"| {number} | {entry['attack']} | {entry['result']} | {listed} |\n")
    return "".join(parts)


def render_decisions() -> str:
    """Return decisions.md: the titles of all decision records."""
    lines = []
    for path in sorted((REFERENCE.parent / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}](../decisions/{path.name})\n")
    return "# Decisions\n\n" + "".join(lines)


PAGES = {
    "attacks.md": render_attacks,
    "cli.md": render_cli,
    "decisions.md": render_decisions,
    "faults.md": render_faults,
    "json.md": render_json,
    "python.md": render_python,
}
"""What renders each page."""


def main() -> int:
    """Write all pages, each as a whole: other tests look at docs/. With --check, only compare them."""
    if "--check" in sys.argv[1:]:
        stale = [name for name, render in PAGES.items() if (REFERENCE / name).read_text() != render()]
        if stale:
            print("run python docs/generate.py for", ", ".join(stale))
        return bool(stale)
    for name, render in PAGES.items():
        aside = REFERENCE / f".{name}.new"
        aside.write_text(render())
        aside.replace(REFERENCE / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
