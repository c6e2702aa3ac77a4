"""Probes as they happen, and the plan as a table."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from csdctl.cli.render.numbers import show_bytes, show_rate, show_seconds
from csdctl.tuning.plan import Plan
from csdctl.worker.contract import ProbeResult


def render_probes(console: Console, results: Mapping[str, ProbeResult | None]) -> None:
    """One line for one round of probes on all machines."""
    shown = [
        f"{name} {result.batch_size}: {show_seconds(result.step_time_s)}, {show_rate(result.images_per_s)}/s"
        if result
        else f"{name}: does not fit in memory"
        for name, result in results.items()
    ]
    console.print("  " + "  |  ".join(shown), markup=False, soft_wrap=True)


def render_plan(console: Console, plan: Plan, path: str) -> None:
    """The plan and where it lies."""
    title = f"plan for {plan.job} by {plan.method}" + (" (emulated fleet)" if plan.emulated else "")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("node")
    for column in ("batch size", "threads", "step", "images/s alone", "peak memory"):
        table.add_column(column, justify="right")
    for number, rank in enumerate(plan.ranks):
        table.add_row(
            str(number),
            rank.node,
            str(rank.batch_size),
            str(rank.threads),
            show_seconds(rank.step_time_s),
            show_rate(rank.images_per_s),
            show_bytes(rank.peak_memory_bytes),
        )
    console.print(table)
    console.print(
        f"global batch size {plan.global_batch}, at most {show_rate(plan.predicted_images_per_s)} images/s "
        f"({plan.num_probes} probes in {show_seconds(plan.measuring_s)})",
        markup=False,
    )
    console.print(f"plan: {path}", markup=False, soft_wrap=True)
