"""What went wrong on a machine, as people read it."""

from rich.console import Console

from csdctl.errors import CsdctlError


def render_problem(console: Console, name: str, error: CsdctlError) -> None:
    """The problem, and what to do about it on the next line."""
    console.print("problem:", style="bold red", end=" ")
    console.print(f"{name}: {error.message}", markup=False, soft_wrap=True)
    if error.remedy:
        console.print(f"  → {error.remedy}", markup=False, soft_wrap=True)
