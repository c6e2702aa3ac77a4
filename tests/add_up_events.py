"""Add up the event log of a run, without csdctl: the figures that csdctl must print about it.

    python tests/add_up_events.py .csdctl/runs/ID/events.jsonl

A rank's events since it joined the others, or since its last `EpochEnd`, are a stint. Its `EpochEnd`, or
else its `Progress` lines together, say what the rank did in it. When the process of rank 0 starts, all join.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

AMOUNTS = ("steps", "samples", "global_samples", "compute_s", "wait_s", "wall_s")


def add_up(path: Path) -> dict[str, Any]:
    """Return the totals and rates of the run, of each rank, and of each epoch of rank 0."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ranks = sorted({int(rank) for event in events if is_joined(event) for rank in event["batch_sizes"]})
    stints = {rank: list(stints_of(events, rank)) for rank in ranks}
    of_rank = {rank: total([amounts for _, amounts in stints[rank]]) for rank in ranks}
    steps, samples, ended, num_missing = read_backwards(events)
    epochs: dict[int, Counter[str]] = {}
    for epoch, group in by_epoch(stints[0]):
        epochs[epoch] = total(group)  # a repeated epoch replaces the one before
    rates = {epoch: rate(amounts, "global_samples") for epoch, amounts in epochs.items()}
    return {
        "steps": steps,
        "samples": samples,
        "epochs": len(ended) + num_missing,
        "training_s": of_rank[0]["wall_s"],
        "samples_per_s": rate(of_rank[0], "global_samples"),
        "ranks": {
            rank: {
                "samples": amounts["samples"],
                "samples_per_s": rate(amounts, "samples"),
                "compute_s": amounts["compute_s"],
                "wait_s": amounts["wait_s"],
            }
            for rank, amounts in of_rank.items()
        },
        "by_epoch": {
            epoch: {"samples_per_s": rates[epoch], "seconds": epochs[epoch]["wall_s"]} for epoch in ended
        },
    }


def stints_of(events: list[dict[str, Any]], rank: int) -> Any:
    """Yield epoch and amounts of each stint of a rank."""
    lines: list[dict[str, Any]] = []
    is_member = False
    for event in [*events, {"event": "Joined", "is_start": True, "batch_sizes": {}}]:
        if event["event"] == "Joined":
            was_member = is_member and not event["is_start"] and rank not in dict(event["lost"])
            is_member = str(rank) in event["batch_sizes"]
            if was_member or not (is_member or event["is_start"]):
                continue
            if lines:
                yield (
                    lines[0]["epoch"],
                    total([Counter({name: line[name] for name in AMOUNTS}) for line in lines]),
                )
            lines = []
        elif event["rank"] != rank:
            continue
        elif event["event"] == "Progress":
            lines.append(event)
        elif event["event"] == "EpochEnd":
            count = event["stepped_samples"]
            yield event["epoch"], Counter({name: event[name] for name in AMOUNTS} | {"global_samples": count})
            lines = []


def by_epoch(stints: list[tuple[int, "Counter[str]"]]) -> Any:
    """Yield each epoch with the amounts of its stints, which follow each other."""
    number, group = None, []
    for epoch, amounts in stints:
        if epoch != number and group:
            yield number, group
            group = []
        number = epoch
        group.append(amounts)
    if group:
        yield number, group


def read_backwards(events: list[dict[str, Any]]) -> tuple[int, int, list[int], int]:
    """Return steps and samples of the model, the epochs that it has behind it, and the number of others.

    What a later start took back does not count: seen from the end, only epochs before its own do. The others
    have ended when no csdctl was there to write it: each counts with as many samples as the largest.
    """
    steps, samples, behind, is_at_joined, has_total = 0, 0, 0, False, False
    first, ended = sys.maxsize, dict[int, int]()
    for event in reversed([event for event in events if event["rank"] == 0]):
        if event["event"] == "EpochEnd" and event["epoch"] < first:
            ended.setdefault(event["epoch"], event["global_samples"])
            first = event["epoch"]
            is_at_joined = True  # what came before belongs to an epoch that has ended
        elif is_start(event):
            if not has_total:
                steps, has_total, behind = steps + event["total_steps"], True, event["epoch"] - 1
            if not is_at_joined:
                samples, is_at_joined = samples + event["epoch_samples"], True
            first = min(first, event["epoch"])
        elif event["event"] == "Progress" and not is_at_joined:
            samples += event["global_samples"]
    started = max(number for number, event in enumerate(events) if is_start(event))
    steps += sum(amounts["steps"] for _, amounts in stints_of(events[started:], 0))
    num_missing = max([behind, *ended]) - len(ended)
    samples += num_missing * max(ended.values(), default=0)
    return steps, samples + sum(ended.values()), sorted(ended), num_missing


def is_joined(event: dict[str, Any]) -> bool:
    """Return whether an event says who takes part."""
    return bool(event["event"] == "Joined")


def is_start(event: dict[str, Any]) -> bool:
    """Return whether an event is the beginning of a process of rank 0."""
    return is_joined(event) and bool(event["is_start"])


def total(parts: "list[Counter[str]]") -> "Counter[str]":
    """Return the sum of amounts."""
    return Counter({name: sum(part[name] for part in parts) for name in AMOUNTS})


def rate(amounts: "Counter[str]", samples: str) -> float | None:
    """Return samples over step time."""
    step_s = amounts["compute_s"] + amounts["wait_s"]
    return amounts[samples] / step_s if step_s else None


if __name__ == "__main__":
    print(json.dumps(add_up(Path(sys.argv[1])), indent=1))
