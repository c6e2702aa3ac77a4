"""Numbers as text, with one format for each quantity. None becomes a dash.

Every number has a text: some are sums of what nodes report, and those may be infinite, not a number, or huge.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import wraps

MAX_METRICS = 3
"""Number of metrics of a model that one line shows."""


def _or_dash(format_number: Callable[[float], str]) -> Callable[[float | None], str]:
    """Let a format also take None, which is a dash, and an integer above all floats, which is infinite."""

    @wraps(format_number)
    def format_any(number: float | None) -> str:
        if number is None:
            return "–"
        try:
            return format_number(float(number))
        except OverflowError:
            return format_number(math.inf if number > 0 else -math.inf)

    return format_any


def format_range(rates: Sequence[float] | None) -> str:
    """Format the range of a forecast, in samples/s. '' for none."""
    return f"{format_rate(rates[0])} to {format_rate(rates[1])}" if rates else ""


@_or_dash
def format_rate(samples_per_s: float) -> str:
    """Format a rate in samples/s."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.1f}"


@_or_dash
def format_share(share: float) -> str:
    """Format a share 0…1 as a percentage."""
    return f"{share:.0%}"


@_or_dash
def format_seconds(seconds: float) -> str:
    """Format a duration."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, in_minute = divmod(round(seconds), 60)
    hours, in_hour = divmod(minutes, 60)
    return f"{hours}:{in_hour:02d}:{in_minute:02d}" if hours else f"{minutes}:{in_minute:02d}"


@_or_dash
def format_bytes(size: float) -> str:
    """Format a size in binary units, with two or three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@_or_dash
def format_joules(energy_joules: float) -> str:
    """Format an energy."""
    units = ["GJ", "MJ", "kJ", "J"]
    while energy_joules >= 1000 and len(units) > 1:
        energy_joules /= 1000
        units.pop()
    if energy_joules < 1:
        return f"{energy_joules:.3g} J"
    digits = 0 if energy_joules >= 100 else 1 if energy_joules >= 10 else 2
    return f"{energy_joules:,.{digits}f} {units[-1]}"


@_or_dash
def format_loss(loss: float) -> str:
    """Format a loss or a metric, such as an accuracy 0…1. Whole numbers above 1 are counts."""
    return f"{loss:.0f}" if loss > 1 and loss.is_integer() else f"{loss:.4f}"


def name_metrics(accuracy: float | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics by name, the accuracy first, where it is one."""
    return ({} if accuracy is None else {"accuracy": accuracy}) | dict(metrics)


def format_metrics(accuracy: float | None, metrics: Mapping[str, float]) -> str:
    """Format the first metrics with their names, each after a comma, and … for more. '' for none."""
    named = list(name_metrics(accuracy, metrics).items())
    first = "".join(f", {name} {format_loss(value)}" for name, value in named[:MAX_METRICS])
    return first + ", …" * (len(named) > MAX_METRICS)


def format_count(items: Sized | int, word: str) -> str:
    """Return the number of `items`, or `items` itself, and their name, in the plural unless it is 1."""
    number = items if isinstance(items, int) else len(items)
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("s") else "s")
