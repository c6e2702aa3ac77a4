"""Numbers as text, with one format for each quantity. None becomes a dash."""

from collections.abc import Sized
from datetime import datetime


def format_rate(samples_per_s: float | None) -> str:
    """Format a rate in samples/s."""
    if samples_per_s is None:
        return "–"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.1f}"


def format_share(share: float | None) -> str:
    """Format a share 0…1 as a percentage."""
    return "–" if share is None else f"{share:.0%}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def format_date(time_s: float) -> str:
    """Format the date of a Unix time, in the local time zone."""
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d}"


def format_bytes(size: float | None) -> str:
    """Format a size in binary units."""
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_joules(energy_joules: float | None) -> str:
    """Format an energy."""
    if energy_joules is None:
        return "–"
    units = ["GJ", "MJ", "kJ", "J"]
    while energy_joules >= 1000 and len(units) > 1:
        energy_joules /= 1000
        units.pop()
    digits = 0 if energy_joules >= 100 else 1 if energy_joules >= 10 else 2
    return f"{energy_joules:,.{digits}f} {units[-1]}"


def format_loss(loss: float | None) -> str:
    """Format a loss."""
    return "–" if loss is None else f"{loss:.4f}"


def format_accuracy(accuracy: float | None) -> str:
    """Format an accuracy 0…1."""
    return "–" if accuracy is None else f"{accuracy:.4f}"


def format_count(items: Sized, word: str) -> str:
    """Return the number of `items` and their name `word`, in the plural unless there is one."""
    return f"{len(items)} {word}" + ("" if len(items) == 1 else "s")
