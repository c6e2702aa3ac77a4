"""Numbers as text, with one format for each quantity. None becomes a dash.

Every number has a text: some are sums of what nodes report, and those may be infinite, not a number, or huge.
"""

import math
from collections.abc import Mapping, Sequence, Sized

MAX_METRICS = 3
"""Number of metrics of a model that one line shows."""


def format_range(rates: Sequence[float] | None) -> str:
    """Format the range of a forecast, in samples/s. '' for none."""
    return f"{format_rate(rates[0])} to {format_rate(rates[1])}" if rates else ""


def format_rate(samples_per_s: float | None) -> str:
    """Format a rate in samples/s."""
    if samples_per_s is None:
        return "–"
    rate = _float(samples_per_s)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def format_share(share: float | None) -> str:
    """Format a share 0…1 as a percentage."""
    return "–" if share is None else f"{_float(share):.0%}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None:
        return "–"
    seconds = _float(seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def format_bytes(size: float | None) -> str:
    """Format a size in binary units."""
    if size is None:
        return "–"
    size = _float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_joules(energy_joules: float | None) -> str:
    """Format an energy."""
    if energy_joules is None:
        return "–"
    energy_joules = _float(energy_joules)
    units = ["GJ", "MJ", "kJ", "J"]
    while energy_joules >= 1000 and len(units) > 1:
        energy_joules /= 1000
        units.pop()
    if energy_joules < 1:
        return f"{energy_joules:.3g} J"
    digits = 0 if energy_joules >= 100 else 1 if energy_joules >= 10 else 2
    return f"{energy_joules:,.{digits}f} {units[-1]}"


def format_loss(loss: float | None) -> str:
    """Format a loss or a metric, such as an accuracy 0…1. Whole numbers above 1 are counts."""
    number = math.nan if loss is None else _float(loss)
    digits = 0 if number > 1 and number.is_integer() else 4
    return "–" if loss is None else f"{number:.{digits}f}"


def name_metrics(accuracy: float | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics by name, the accuracy first, where it is one."""
    return ({} if accuracy is None else {"accuracy": accuracy}) | dict(metrics)


def format_metrics(accuracy: float | None, metrics: Mapping[str, float]) -> str:
    """Format the first metrics with their names, each behind a comma, and … for others. '' for none."""
    named = list(name_metrics(accuracy, metrics).items())
    shown = "".join(f", {name} {format_loss(value)}" for name, value in named[:MAX_METRICS])
    return shown + ", …" * (len(named) > MAX_METRICS)


def format_count(items: Sized | int, word: str) -> str:
    """Return the number of `items`, or `items` itself, and their name, in the plural unless it is 1."""
    number = items if isinstance(items, int) else len(items)
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("s") else "s")


def _float(number: float) -> float:
    """Return `number`. An integer above all floats is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
