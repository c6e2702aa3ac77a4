"""`csdctl verify`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    DEFAULT_JOB,
    ExcludeOption,
    FleetOption,
    JobArgument,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams


def verify(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="The plan to follow; default: the one `tune` wrote, or 16 samples a rank."
        ),
    ] = None,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Check on your model and fleet that the ranks compute what one process would."""
    from csdctl.cli.render.preparing import PreparingView
    from csdctl.cli.render.verify import judge_verified, render_verified, verify_document
    from csdctl.job.model import load_job
    from csdctl.launch.tools import check_tools
    from csdctl.tuning.plan import load_plan
    from csdctl.workflows.data.prepare import prepare_job
    from csdctl.workflows.train.plan_validation import check_plan
    from csdctl.workflows.train.train import TrainOptions
    from csdctl.workflows.train.train import verify as verify_run
    from csdctl.workflows.tune.tune import equal_plan
    from csdctl.workflows.workspace.partial_failure import choose_fleet
    from csdctl.workflows.workspace.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)
    check_tools()
    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet, "verify", is_holding=True, say=streams.say) as space:
        path = plan or space.project.plan(loaded.name)
        if plan or path.exists():
            chosen = load_plan(path)
            check_plan(chosen, loaded, space.fleet, space.facts)
        else:
            names = [node.name for node in space.fleet.nodes]
            chosen = equal_plan(loaded, space.fleet, space.facts, names, batch_size=16)
        with PreparingView(streams.console) as view:
            prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say, view.show)
        streams.say(f"starting {len(chosen.ranks)} ranks")
        if loaded.noise:
            streams.say("compared without clipping and noise: the samples are random, and none is private")
        verified = verify_run(loaded, chosen, prepared, space, TrainOptions())
    nodes = [rank.node for rank in chosen.ranks]
    render_verified(streams.console, verified, nodes, emulated=space.fleet.emulated)
    streams.result(verify_document(verified, nodes, emulated=space.fleet.emulated))
    judge_verified(verified)
