"""A quick way to read what almost all lines of a stored log are: progress of a rank.

It takes a line only in the very form in which `EventLog` writes it, and only with values that the general way
(`event_from_line`, `check_event`) takes, too; every other line is read by that.
"""

import json
import re
from collections.abc import Sequence

from csdctl.worker.protocol.events import Progress

_SECONDS = r"\d{1,8}\.\d{1,9}"
_MEASURED = r"-?(?:0|[1-9]\d{0,14})\.\d{1,18}"
_METRIC = rf'\\"[a-z0-9_]{{1,40}}\\":{_MEASURED}'
_METRICS = rf"\{{(?:{_METRIC}(?:,{_METRIC}){{0,9}})?\}}"
_CELSIUS = r"(?:\d{1,3}|-\d{1,2})\.\d{1,9}"
_COUNTS = {"step": r"0|[1-9]\d{0,14}", "steps": r"[1-9]\d{0,14}", "samples": r"0|[1-9]\d{0,14}"}

Spent = tuple[float, int, int, float, float, float, float | None, float | None, float | None, float | None]
"""Unix time of arrival, rank, samples; seconds: compute, wait, wall, and, where known, input, others, CPU;
degrees Celsius, where known."""


def _field(name: str, value: str) -> str:
    return rf'\\"{name}\\":{value}'


def _pattern(*captured: str, is_of_0: bool = False) -> str:
    """Return the pattern of a line; only the fields in `captured` are groups, which are what takes time."""
    rank = "0" if is_of_0 else r"[1-9]\d{0,4}", r'\\"[\x20\x21\x23-\x5b\x5d-\x7e]{1,256}\\"'
    fields = (
        _field("event", r'\\"Progress\\"'),
        rf"(?P<ident>{_field('rank', rank[0])},{_field('node', rank[1])})",
        _field("epoch", r"(?P<epoch>0|[1-9]\d{0,8})"),
        *(_field(name, f"(?P<{name}>{value})") for name, value in _COUNTS.items()),
        *(_field(name, f"(?P<{name}>{_SECONDS})") for name in ("compute_s", "wait_s", "wall_s")),
        _field("global_samples", r"(?P<global_samples>0|[1-9]\d{0,14})" if is_of_0 else "0"),
        _field("loss", f"(?P<loss>{_MEASURED}|null)" if is_of_0 else "null"),
        _field("accuracy", f"(?P<accuracy>{_MEASURED}|null)" if is_of_0 else "null"),
        _field("metrics", f"(?P<metrics>{_METRICS})" if is_of_0 else r"\{\}"),
        *(_field(name, f"(?P<{name}>{_SECONDS}|null)") for name in ("input_s", "others_s", "cpu_s")),
    )
    of_machine = (
        _field("memory_bytes", r"(?P<memory_bytes>0|[1-9]\d{0,14}|null)"),
        _field("temperature_c", f"(?P<temperature_c>{_CELSIUS}|null)"),
    )
    optional = "(?:," + ",".join(of_machine) + ")?"  # older logs have none
    time = r"(?P<time>\d{1,10}(?:\.\d{1,9})?)"
    whole = rf'\{{"time": {time}, "line": "@csdctl \{{' + ",".join(fields) + optional + r'\}"\}\n?'
    return re.sub(r"\?P<(\w+)>", lambda found: "" if found[1] in captured else "?:", whole)


_TIMES = ("compute_s", "wait_s", "wall_s", "input_s", "others_s", "cpu_s")
_OF_MACHINE = ("memory_bytes", "temperature_c")
_PROGRESS = re.compile(_pattern("time", "ident", "epoch", *_COUNTS, *_TIMES, *_OF_MACHINE), re.ASCII)
_OF_0 = ("global_samples", "loss", "accuracy", "metrics")
_PROGRESS_OF_0 = re.compile(
    _pattern("time", "ident", "epoch", *_COUNTS, *_TIMES, *_OF_0, *_OF_MACHINE, is_of_0=True), re.ASCII
)
_SPENT = re.compile(_pattern("time", "ident", "samples", *_TIMES, "temperature_c").encode(), re.ASCII)


def _ident(rank: int, node: str) -> str:
    """Return the text of a rank and its node in a line."""
    return rf"\"rank\":{rank},\"node\":\"{node}\""


class SpentReader:
    """Reads from lines of progress what ranks spent their time on, in a fourth of the time of an event."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._ranks = {_ident(rank, node).encode(): rank for rank, node in enumerate(nodes) if rank}

    def parse(self, line: bytes) -> Spent | None:
        """Return what `line` says; None for any line that `parse_progress` does not take."""
        found = _SPENT.fullmatch(line)
        if found is None:
            return None
        time, ident, samples, compute, wait, wall, reading, others, cpu, celsius = found.groups(b"null")
        rank = self._ranks.get(ident)
        if rank is None:
            return None
        return (
            float(time),
            rank,
            int(samples),
            float(compute),
            float(wait),
            float(wall),
            None if reading == b"null" else float(reading),
            None if others == b"null" else float(others),
            None if cpu == b"null" else float(cpu),
            None if celsius == b"null" else float(celsius),
        )


def parse_progress(line: str, nodes: Sequence[str]) -> tuple[float, Progress] | None:
    """Return the Unix time of arrival and the progress in `line`; None for any other line."""
    found, of_0 = _PROGRESS.fullmatch(line), None
    if found is None:
        found = of_0 = _PROGRESS_OF_0.fullmatch(line)
    if found is None:
        return None
    rank = int(found[2].partition(":")[2].partition(",")[0])
    if rank >= len(nodes) or found[2] != _ident(rank, nodes[rank]):
        return None
    values = found.groups("null")
    metrics = json.loads(values[12].replace("\\", "")) if of_0 else {}
    if of_0 and len(metrics) != values[12].count(":"):  # a name is there twice
        return None
    epoch, step, steps, samples = map(int, values[2:6])
    compute, wait, wall = map(float, values[6:9])
    reading, others, cpu, memory, celsius = values[-5:]
    progress = Progress(
        rank,
        nodes[rank],
        epoch,
        step,
        steps,
        samples,
        compute,
        wait,
        wall,
        int(values[9]) if of_0 else 0,
        _number(values[10]) if of_0 else None,
        _number(values[11]) if of_0 else None,
        metrics,
        _number(reading),
        _number(others),
        _number(cpu),
        None if memory == "null" else int(memory),
        _number(celsius),
    )
    return float(found[1]), progress


def _number(text: str) -> float | None:
    return None if text == "null" else float(text)
