"""`csdctl scale`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_job
from csdctl.cli.commands.report import HtmlOption


@on_job
def scale(
    call: Call,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of nodes: 0,1,2 or 0..36; 0 is the host alone. Default: 0, 1, 2, 4 … and all.",
        ),
    ] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="Only the weak series: every rank keeps its batch size.")
    ] = False,
    strong: Annotated[
        bool, typer.Option("--strong", help="Only the strong series: the global batch size stays.")
    ] = False,
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    max_steps: options.MaxStepsOption = None,
    skip_doctor: options.SkipDoctorOption = False,
    html: HtmlOption = None,
    dry_run: options.DryRunOption = False,
) -> None:
    """Train with 0, 1, 2 … nodes, and show speed-up, efficiency and energy."""
    from csdctl.documents import save_text
    from csdctl.reporting.page import render_scaling_page
    from csdctl.reporting.scaling import KINDS
    from csdctl.terminal.report import show_points, show_series
    from csdctl.terminal.train import train_point
    from csdctl.workflows.forecast.forecast import parse_node_counts
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.scale import STRONG, WEAK, ScaleRequest, plan_points, run_series
    from csdctl.workflows.train.train import TrainRequest

    streams = call.streams
    kinds = [kind for kind, is_asked in ((WEAK, weak), (STRONG, strong)) if is_asked] or list(KINDS)
    # Batch sizes that moved during a run would be another plan than that of its point.
    wanted = TrainOptions(max_steps=max_steps, is_balanced=False)
    training = TrainRequest(
        call.job,
        call.fleet,
        call.directory,
        wanted,
        plan,
        batch_size,
        is_preflight_skipped=skip_doctor,
    )
    request = ScaleRequest(training, kinds, parse_node_counts(nodes) if nodes is not None else ())
    if dry_run:
        show_points(streams, plan_points(request))
        return
    found = run_series(request, lambda point, of: train_point(streams, point, of))
    for kind, series in found.items():
        path = html.with_stem(f"{html.stem}-{kind}") if html and len(found) > 1 else html
        if path:
            save_text(path, render_scaling_page(series))
        show_series(streams, kind, series, path)
