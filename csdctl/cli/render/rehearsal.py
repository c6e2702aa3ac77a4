"""The output of `prepare --dry-run` and `train --dry-run`."""

from rich import box
from rich.table import Table

from csdctl.cli.render.train import TrainingScreen
from csdctl.cli.render.tune import plan_document, render_plan
from csdctl.cli.streams import Streams
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.data.rehearsal import Rehearsal
from csdctl.workflows.train.session import TrainRequest, rehearse_training


def show_rehearsal(streams: Streams, rehearsal: Rehearsal) -> None:
    """Print the data that `prepare` would read; raises InputError when some is not there."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("machine", "data", "path", "found"):
        table.add_column(column, overflow="fold")
    for source in rehearsal.sources:
        style = "bold red" if source.found in ("missing", "unreadable") and not rehearsal.sample else ""
        table.add_row(source.machine, source.data, source.path, source.found, style=style)
    streams.console.print(table)
    if rehearsal.sample:
        streams.say(f"these paths would first be filled with the sample {rehearsal.sample}")
    streams.say(_describe_samples(rehearsal.num_samples))
    streams.say("dry run: nothing was prepared")
    streams.result({"schema": "csdctl.prepare.dry-run/1", **vars(rehearsal)})
    rehearsal.check()


def show_training_rehearsal(streams: Streams, request: TrainRequest) -> None:
    """Examine the machines and print the plan that `train` would follow; raises CsdctlError as it does."""
    with TrainingScreen(streams, emulated=request.fleet.emulated) as screen:
        found = rehearse_training(request, screen)
    if request.batch_size:
        path = "none: --batch-size"
    else:
        project = ProjectDirectory(streams.directory)
        path = str(found.run.manifest if found.run else request.plan_path or project.plan(request.job.name))
    render_plan(streams.console, found.plan, path)
    behind = f" behind {found.cut}" if found.cut else ""
    streams.say(f"would train: {found.strategy}{behind}, collective {request.options.collective}")
    if found.run:
        streams.say(f"would resume run {found.run.run_id}")
    streams.say(_describe_samples(found.num_samples))
    streams.say("dry run: nothing was prepared or trained")
    document = {
        "schema": "csdctl.train.dry-run/1",
        "resume": found.run.run_id if found.run else None,
        "strategy": found.strategy,
        "cut": found.cut,
        "collective": request.options.collective,
        "num_samples": found.num_samples,
        "plan": plan_document(found.plan, path),
    }
    streams.result(document)


def _describe_samples(num_samples: int | None) -> str:
    if num_samples is None:
        return "the data of this job has not been prepared before"
    return f"{num_samples:,} samples when this job was last prepared"
