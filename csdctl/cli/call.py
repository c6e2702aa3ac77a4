"""The options that commands on a fleet share, what they select, and the end of such a command."""

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csdctl.cli import options, parameters
from csdctl.runs.private import STATE_DIRECTORY
from csdctl.terminal.streams import Streams

if TYPE_CHECKING:
    from csdctl.errors import CsdctlError
    from csdctl.fleet.model import Fleet
    from csdctl.job.model import Job
    from csdctl.transport.many import Outcome
    from csdctl.workflows.train.request import TrainOptions, TrainRequest

Command = Callable[..., None]
FIELDS = {"job": "job_path", "fleet": "fleet_path", "json": "is_json"}
"""Parameters of commands that have another name as a field of a Call."""
ON_EACH_NODE = {"discover", "trust", "provision", "exec", "inventory", "clean", "deploy"}
"""Commands that act on each selected node by itself. Others also need the servers between them."""
VERBOSE = ("-v", "-vv")
QUIET = ("-q", "--quiet")
SELECTING = ("--limit", "--exclude", "--failed-from")


def on_fleet(command: Command) -> Command:
    """Add the options of a command that visits all nodes of a fleet. It gets them as a Call."""
    return _add_options(command, ["fleet", "limit", "exclude", "failed_from", "json"])


def on_job(command: Command) -> Command:
    """Add the options of a command for a job on a fleet. It gets them as a Call."""
    return _add_options(command, ["job", "fleet", "limit", "exclude", "json"])


def _shared(
    job: Path = options.JOB,
    fleet: Path = options.FLEET,
    limit: list[str] | None = options.LIMIT,
    exclude: list[str] | None = options.EXCLUDE,
    failed_from: Path | None = options.FAILED_FROM,
    json: bool = options.JSON,
) -> None: ...


def _add_options(command: Command, names: list[str]) -> Command:
    """Return `command` with those parameters of `_shared` that it lacks, in place of the Call."""
    shared_parameters = inspect.signature(_shared).parameters
    parameters = dict(list(inspect.signature(command).parameters.items())[1:])
    added = {name: shared_parameters[name] for name in names if name not in parameters}
    first = {name: added[name] for name in ("job", "fleet") if name in added}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        shared = {FIELDS.get(name, name): values.pop(name) for name in added}
        command(Call(command.__name__, **shared), **values)

    in_order = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (first | parameters | added).values()
    ]
    run.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]
    return run


typed: list[str] = []
"""The arguments of this csdctl, as they were typed."""


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments before `--`: what follows belongs to another program."""
    return list(arguments[: arguments.index("--")] if "--" in arguments else arguments)


def open_streams(*, is_json: bool = False) -> Streams:
    """Return the streams of this csdctl, as its -v and -q say."""
    words = {*own_arguments(typed)}
    is_verbose, is_quiet = not words.isdisjoint(VERBOSE), not words.isdisjoint(QUIET)
    return Streams(
        is_json=is_json, is_verbose=is_verbose, is_debugging=VERBOSE[1] in words, is_quiet=is_quiet
    )


def retry_line(arguments: Sequence[str]) -> str:
    """Return the command line that repeats `arguments` on the nodes where they failed."""
    words = own_arguments(arguments)
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word.partition("=")[0] not in SELECTING:
            kept.append(word)
        is_value = not is_value and word in SELECTING
    failed_from = ["--failed-from", str(Path(STATE_DIRECTORY, "failed.json"))]
    return shlex.join(["csdctl", *kept, *failed_from, *arguments[len(words) :]])


@dataclass
class Call:
    """One call of a command: its name, its streams, and the job and the fleet that its options select."""

    command: str
    is_json: bool
    fleet_path: Path
    limit: list[str] | None
    exclude: list[str] | None
    failed_from: Path | None = None
    job_path: Path = parameters.DEFAULT_JOB
    repeated_by: Sequence[str] = ()  # if not by the typed arguments

    def __post_init__(self) -> None:
        self.streams = open_streams(is_json=self.is_json)
        self.directory = self.streams.directory

    @cached_property
    def job(self) -> "Job":
        """The job. Raises InputError."""
        from csdctl.job.model import load_job

        return load_job(self.job_path)

    @cached_property
    def fleet(self) -> "Fleet":
        """The fleet with the selected nodes. Only training may be without any. Raises InputError."""
        from csdctl.workflows.workspace.workspace import choose_fleet

        return choose_fleet(
            self.fleet_path,
            self.limit,
            self.exclude,
            self.failed_from,
            may_be_empty=self.command == "train",
            with_servers=self.command not in ON_EACH_NODE,
        )

    def training(self, options: "TrainOptions", **choices: Any) -> "TrainRequest":
        """Return the request to train the job on the fleet. `choices` are its other fields."""
        from csdctl.workflows.train.request import TrainRequest

        return TrainRequest(self.job, self.fleet, self.directory, options, **choices)

    def finish(
        self,
        outcomes: "Mapping[str, Outcome[Any]]",
        document: object = None,
        *,
        schema: str = "",
        is_dry: bool = False,
    ) -> None:
        """Report the machines that failed, then `conclude`. `schema` is of a document of the results."""
        from csdctl.terminal.nodes import render_failed
        from csdctl.transport.many import errors_of

        failed = errors_of(outcomes)
        render_failed(self.streams.console, failed, self.fleet)
        document = document or {
            "schema": schema,
            "is_dry_run": is_dry,
            "machines": {
                name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None
            },
            "failed": failed,
        }
        self.conclude(document, list(outcomes), failed, is_dry=is_dry)

    def conclude(
        self,
        document: object,
        machines: Sequence[str],
        failed: "Mapping[str, CsdctlError]",
        *,
        is_dry: bool = False,
    ) -> None:
        """Print the JSON document, record which of `machines` failed, and raise one error for them."""
        from csdctl.workflows.workspace.workspace import conclude

        self.streams.result(document)
        if failed or not is_dry:
            retry = retry_line(self.repeated_by or typed or [self.command])
            conclude(self.streams.project, self.command, machines, failed, retry)
