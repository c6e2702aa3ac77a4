"""The result of `verify`, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from csdctl.terminal.console import PrintableConsole, build_pairs
from csdctl.worker.protocol.events import Verified
from csdctl.worker.protocol.features import Recomputed
from csdctl.workflows.train.verify import Verdict


def render_verified(
    console: PrintableConsole, verified: Verified, verdict: Verdict, nodes: Sequence[str], *, emulated: bool
) -> None:
    """Print how much sum, gradients and weights differ, and how far one process is from itself."""
    sizes = ", ".join(f"{node} {size}" for node, size in zip(nodes, verified.batch_sizes, strict=True))
    fleet = " (emulated fleet)" if emulated else ""
    pairs = [("samples", f"{verified.global_batch}: {sizes}{fleet}")]
    sums = (
        f"differs by {verified.sum_difference:.1e} from the ranks' gradients added in float64; "
        f"rounding explains {verified.sum_rounding:.1e}"
    )
    pairs.append(("sum", sums))
    most = max(range(len(nodes)), key=lambda rank: verified.of_ranks[rank].difference)
    found = verified.of_ranks[most]
    if found.difference == 0:
        told = "of every rank bit-identical with that of one process"
    else:
        told = f"of {nodes[most]} differs most from that of one process, by {found.difference:.1e}"
    pairs.append(("gradient", told))
    spread = max(rank.spread for rank in verified.of_ranks)
    one_sample = min(rank.one_sample for rank in verified.of_ranks)
    pairs.append(("", f"one process differs from itself by {spread:.1e}; one sample makes {one_sample:.1e}"))
    if verified.compared_in != verified.dtype:
        pairs.append(("", f"compared in {verified.compared_in}: rounding in {verified.dtype} hides a sample"))
    pairs.append(("one batch", _describe_one_batch(verified)))
    pairs.append(("weights", f"bit-identical on all ranks ({verified.weights_hash[:16]}…)"))
    pairs.append(("collective", verified.collective))
    if verdict.is_equal:
        pairs.append(("result", verdict.text))
    console.print(build_pairs(pairs))


def verify_document(
    verified: Verified, verdict: Verdict, nodes: Sequence[str], *, emulated: bool
) -> dict[str, Any]:
    """Return the `csdctl.verify/1` document."""
    left_out = ("rank", "node", "of_ranks", "batch_sizes")  # "ranks" has them by name
    return {
        "schema": "csdctl.verify/1",
        "emulated": emulated,
        "is_equal": verdict.is_equal,
        "verdict": verdict.text,
        **{name: value for name, value in vars(verified).items() if name not in left_out},
        "ranks": {
            node: {"batch_size": size, **vars(rank)}
            for node, size, rank in zip(nodes, verified.batch_sizes, verified.of_ranks, strict=True)
        },
    }


def describe_features(found: Mapping[str, Recomputed]) -> str:
    """Return how stored features compare with those that their machine computes now."""
    num_rows = sum(one.num_rows for one in found.values())
    if not num_rows:
        return "none to compare; train with --strategy features first"
    most = max(found, key=lambda node: found[node].difference)
    told = f"differ by {found[most].difference:.1e} at most ({most})"
    if not found[most].difference:
        told = "are bit-identical"
    return f"{num_rows:,} rows on {len(found)} machines, computed again, {told}"


def _describe_one_batch(verified: Verified) -> str:
    if verified.one_batch is None:
        return f"not compared with one batch of all samples: {'; '.join(verified.not_one_batch)}"
    return f"of all samples in one process differs by {verified.one_batch.difference:.1e}"
