"""Commands for the runs of this project: runs, report, export."""

import os
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.errors import ExitCode
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.streams import Streams

runs = typer.Typer(
    help="List, watch, stop, compare and remove runs.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)
WATCHER_NICE = 19
"""A watcher computes only when the ranks leave the processor to it."""
RunArgument = Annotated[
    str | None,
    typer.Argument(
        help="Id of the run, or how it begins; default: the latest.",
        autocompletion=options.complete_runs,
    ),
]
GivenRunArgument = Annotated[
    str, typer.Argument(help="Id of the run, or how it begins.", autocompletion=options.complete_runs)
]


@runs.command("list")
def list_runs(json: options.JsonOption = False) -> None:
    """List all runs, the latest last."""
    from csdctl.terminal.runs import show_runs
    from csdctl.workflows.runs import manage

    streams = Streams(is_json=json)
    show_runs(streams, manage.list_runs(streams.project, streams.say))


@runs.command()
def show(run: RunArgument = None, json: options.JsonOption = False) -> None:
    """Show the results of a run, as `csdctl report`."""
    report([run] if run else None, json=json)


@runs.command()
def watch(run: RunArgument = None, json: options.JsonOption = False) -> None:
    """Show a run as it trains, from any terminal; Ctrl-C ends the view, not the run.

    Exits with 1 when the run has failed.
    """
    from csdctl.terminal.runs import watch_run
    from csdctl.workflows.runs.follow import follow_run

    os.nice(WATCHER_NICE)
    streams = Streams(is_json=json)
    followed = follow_run(streams.project.find_run(run))
    if not watch_run(streams, followed):
        raise typer.Exit(ExitCode.FAILED)


@runs.command()
def logs(
    run: RunArgument = None,
    which: Annotated[
        str | None,
        typer.Argument(
            help="A rank, a node, mpirun, or csdctl for the output of a detached run; default: all.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is added, until the run ends.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines from the end of each log.")] = 200,
) -> None:
    """Print the logs of a run's ranks and of mpirun."""
    from csdctl.terminal.runs import show_logs
    from csdctl.workflows.runs.follow import find_logs

    streams = Streams()
    found = streams.project.find_run(run)
    show_logs(streams, found, find_logs(found, which), lines, is_following=follow)


@runs.command()
def stop(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Id of the run, or how it begins; default: the one that is running.",
            autocompletion=options.complete_runs,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end of the run.")] = 120.0,
    json: options.JsonOption = False,
) -> None:
    """Stop a run as Ctrl-C does: the ranks finish their step, and the run can be resumed.

    A second `stop` ends the ranks at once.
    """
    from csdctl.terminal.runs import show_stopped
    from csdctl.workflows.runs.manage import stop_run

    streams = Streams(is_json=json)
    show_stopped(streams, stop_run(streams.project, run, timeout))


@runs.command()
def rm(run: GivenRunArgument, yes: options.YesOption = False, json: options.JsonOption = False) -> None:
    """Remove a run: its model, checkpoints, events and logs."""
    from csdctl.workflows.runs.manage import remove_run

    streams = Streams(is_json=json)
    removed = remove_run(streams.project, run, lambda question: streams.confirm(question, yes=yes))
    streams.say(f"removed run {removed.run_id}")
    streams.result({"schema": "csdctl.runs.rm/1", "run": removed.run_id})


@runs.command()
def diff(first: GivenRunArgument, second: GivenRunArgument, json: options.JsonOption = False) -> None:
    """Show in which settings and results two runs differ."""
    from csdctl.terminal.runs import show_differences
    from csdctl.workflows.runs.compare import compare_runs

    streams = Streams(is_json=json)
    show_differences(streams, *compare_runs(streams.project, first, second))


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids of runs, shown side by side; default: the latest.",
            metavar="[RUN]...",
            autocompletion=options.complete_runs,
        ),
    ] = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy",
            help="Show the bytes sent instead, by link and traffic class; with noise, also ε.",
        ),
    ] = False,
    html: options.HtmlOption = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each run and epoch.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show the results of a run, or of several side by side."""
    from csdctl.terminal import report as render
    from csdctl.workflows.reporting import report as reporting
    from csdctl.workflows.runs.manage import find_latest, process_of

    def is_running(run: RunDirectory) -> bool:
        return process_of(run).is_running

    streams = Streams(is_json=json)
    ids = runs or [find_latest(streams.project, streams.say).run_id]
    if privacy:
        render.check_privacy_options(ids, has_files=bool(html or csv))
        render.show_privacy(streams, reporting.privacy(streams.project, ids[0]))
    elif html or csv:
        render.show_files(streams, reporting.write_files(streams.project, ids, html, csv, is_running))
    else:
        render.show_reports(
            streams, [reporting.report(streams.project, run_id, is_running) for run_id in ids]
        )


def export(
    to: Annotated[str, typer.Option(metavar="FORMAT", help="tensorboard or mlflow.")],
    run: Annotated[
        str | None,
        typer.Argument(
            help="Id of the run; default: the latest.",
            metavar="[RUN]",
            autocompletion=options.complete_runs,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="TensorBoard's directory; default: RUN-tensorboard."),
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="MLflow's server or directory; default: MLflow's own.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Write a run for TensorBoard or MLflow."""
    from csdctl.workflows.reporting.report import export as export_run
    from csdctl.workflows.runs.manage import find_latest

    streams = Streams(is_json=json)
    run_id = run or find_latest(streams.project, streams.say).run_id
    written = export_run(streams.project, run_id, to, output, tracking_uri)
    streams.result({"schema": "csdctl.export/1", "format": to, "written": written})
    streams.say(f"wrote {written}")
