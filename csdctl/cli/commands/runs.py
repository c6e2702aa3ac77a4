"""Commands for the runs of this project: runs, report."""

import os
from functools import partial
from pathlib import Path

import typer

from csdctl.cli import options, parameters
from csdctl.cli.call import open_streams
from csdctl.cli.parameters import LATEST, argument, complete_runs, option, parse_age, parse_size
from csdctl.errors import ExitCode, InputError

runs = parameters.group(help="List, watch, stop and remove runs.")
run_argument = partial(argument, autocompletion=complete_runs)
RUN = run_argument(None, "Run ID, unique prefix or `latest`; default: the latest.")


@runs.command("list")
def list_runs(json: bool = options.JSON) -> None:
    """List all runs, the latest last."""
    from csdctl.terminal.report import show_runs
    from csdctl.workflows.runs import manage

    streams = open_streams(is_json=json)
    show_runs(streams, manage.list_runs(streams.project, streams.say))


@runs.command()
def watch(run: str | None = RUN, json: bool = options.JSON) -> None:
    """Show a run as it trains.

    Ctrl-C ends the view, not the run. Exits with 1 when the run has failed.
    """
    from csdctl.runs.directory import find_run
    from csdctl.terminal.report import watch_run
    from csdctl.workflows.runs.manage import follow_run

    os.nice(19)  # it computes only when the ranks leave the processor to it
    streams = open_streams(is_json=json)
    started, events = follow_run(find_run(streams.project, run, streams.say))
    if not watch_run(streams, started, events):
        raise typer.Exit(ExitCode.FAILED)


@runs.command()
def logs(
    run: str | None = RUN,
    which: str | None = argument(None, "A rank, a node, or csdctl (of a detached run); default: all."),
    follow: bool = option(False, "Follow the log until the run ends.", "--follow", "-f"),
    lines: int = option(200, "Lines from the end of each log.", "--lines", "-n", min=0),
) -> None:
    """Print the logs of a run's ranks and of their links."""
    from csdctl.runs.directory import find_run
    from csdctl.workflows.runs.manage import find_logs, print_logs

    streams = open_streams()
    directory = find_run(streams.project, run, streams.say)
    if logs := find_logs(directory, which):
        print_logs(directory, logs, lines, is_following=follow)
    else:
        streams.say(f"run {directory.run_id} has no logs yet")


@runs.command()
def stop(
    run: str | None = run_argument(None, "Run ID, unique prefix or `latest`; default: the running one."),
    timeout: float = option(120.0, "Seconds to wait for the run to end.", min=0),
    json: bool = options.JSON,
) -> None:
    """Stop a run after its current step.

    The run can be resumed. A second `stop` ends the ranks at once.
    """
    from csdctl.terminal.report import show_stopped
    from csdctl.workflows.runs.manage import stop_run

    streams = open_streams(is_json=json)
    show_stopped(streams, stop_run(streams.project, run, timeout, streams.say))


@runs.command()
def rm(
    runs: list[str] | None = run_argument(None, "Run IDs, unique prefixes or `latest`.", metavar="[RUN]..."),
    older_than: float | None = option(
        None, "Runs whose last event is older, such as 90d.", parser=parse_age, metavar="AGE"
    ),
    max_size: int | None = option(
        None, "The oldest runs, until the others fit, such as 50G.", parser=parse_size, metavar="SIZE"
    ),
    keep: int | None = option(None, "Keep the newest runs; without another rule, all others go.", min=0),
    yes: bool = options.YES,
    json: bool = options.JSON,
) -> None:
    """Remove runs and their files: those named, or all that the rules name.

    A rule removes no run that is running, that is the latest, or whose ID a YAML file of the project has.
    """
    from csdctl.terminal.report import show_removable
    from csdctl.workflows.runs import manage

    streams = open_streams(is_json=json)
    rules = older_than, max_size, keep
    if bool(runs) == (rules != (None, None, None)):
        problem = "received runs and rules" if runs else "received no run and no rule"
        raise InputError(problem, remedy="pass run IDs, or rules such as --older-than 90d --keep 20")
    if not runs:
        stored = [*manage.read_stored(streams.project, streams.say)]
        runs = show_removable(streams, stored, manage.choose_runs(stored, *rules))
    removed = manage.remove_runs(streams.project, runs, partial(streams.confirm, yes=yes)) if runs else []
    for run in removed:
        streams.say(f"removed run {run.run_id}")
    names = [run.run_id for run in removed]
    streams.result({"schema": "csdctl.runs.rm/1", "run": next(iter(names), ""), "runs": names})


def report(
    runs: list[str] | None = run_argument(
        None,
        "Run IDs, unique prefixes or `latest`, shown side by side; default: the latest.",
        metavar="[RUN]...",
    ),
    privacy: bool = option(False, "Show bytes sent instead, by link and traffic class; with noise, also ε."),
    html: Path | None = options.HTML,
    csv: Path | None = option(None, "Write a row for each run and epoch.", metavar="FILE"),
    force: bool = options.FORCE,
    json: bool = options.JSON,
) -> None:
    """Show the results of a run, or of several side by side."""
    from csdctl.runs.directory import find_run
    from csdctl.terminal import report as render
    from csdctl.workflows.reporting import report as reporting

    streams = open_streams(is_json=json)
    directories = [find_run(streams.project, run, streams.say) for run in runs or [LATEST]]
    if privacy:
        if html or csv or len(directories) > 1:
            raise InputError(
                "--privacy shows one run in the terminal; received more runs or a file to write",
                remedy="pass one run, without --html and --csv",
            )
        render.show_privacy(streams, reporting.privacy(streams.project, directories[0], streams.say))
    elif html or csv:
        written = reporting.write_files(directories, html, csv, force=force)
        render.show_files(streams, written)
    else:
        render.show_reports(streams, [(run, reporting.report(run)) for run in directories])
