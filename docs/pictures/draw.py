"""Draws the pictures of docs/explanation/architecture.md from the code's own imports.

    python docs/pictures/draw.py

`tests/unit/test_architecture.py` fails when a picture no longer matches the code.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = Path(__file__).parent
WORKER = "worker."
BOX_WIDTH, BOX_HEIGHT, GAP, ROW_HEIGHT = 118, 34, 14, 74

Graph = dict[str, set[str]]


def package_of(module: str) -> str:
    """Return a module's package: `csdctl.fleet.model` → fleet, `csdctl.worker.data.arrays` → worker.data."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["worker"] and len(parts) > 1 else (parts[0] if parts else "")


def read_imports() -> Graph:
    """Return which package imports which, from the import statements of all modules."""
    graph: Graph = {}
    for path in sorted((ROOT / "csdctl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        package = package_of(module)
        if package in ("", "worker", "__main__"):
            continue
        found = graph.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("csdctl."):
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("csdctl.")]
            found.update(package_of(name) for name in names if package_of(name) not in ("", package))
    return graph


def reduce(graph: Mapping[str, set[str]]) -> Graph:
    """Return the transitive reduction: imports that do not follow from others."""
    below = {package: _reachable(graph, package) for package in graph}
    return {
        package: {one for one in found if not any(one in below[other] for other in found - {one})}
        for package, found in graph.items()
    }


def _reachable(graph: Mapping[str, set[str]], package: str) -> set[str]:
    found: set[str] = set()
    stack = list(graph[package])
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += graph[one]
    return found


def levels_of(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each package's level: 0 for one that imports none, else one above the highest it imports."""
    levels: dict[str, int] = {}

    def level(package: str) -> int:
        if package not in levels:
            levels[package] = 1 + max((level(one) for one in graph[package]), default=-1)
        return levels[package]

    for package in graph:
        level(package)
    return levels


@dataclass(frozen=True)
class Box:
    """A box of a picture, by its upper left corner."""

    x: float
    y: float
    text: str
    width: float = BOX_WIDTH
    is_marked: bool = False

    @property
    def top(self) -> tuple[float, float]:
        """The middle of its upper edge."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        """The middle of its lower edge."""
        return self.x + self.width / 2, self.y + BOX_HEIGHT


def render_packages() -> str:
    """Return the picture of the packages as SVG: an arrow is an import that does not follow from others."""
    graph = read_imports()
    levels = levels_of(graph)
    rows: dict[int, list[str]] = {}
    for package, level in levels.items():
        rows.setdefault(max(levels.values()) - level, []).append(package)
    width = max(len(row) for row in rows.values()) * (BOX_WIDTH + GAP) + 2 * GAP
    boxes = {}
    for row, packages in rows.items():
        # Packages of the worker stand on the right: they run on every rank.
        ordered = sorted(packages, key=lambda package: (package.startswith(WORKER), package))
        left = (width - len(ordered) * (BOX_WIDTH + GAP)) / 2
        for column, package in enumerate(ordered):
            x = left + column * (BOX_WIDTH + GAP)
            boxes[package] = Box(x, GAP + row * ROW_HEIGHT, package, is_marked=package.startswith(WORKER))
    arrows = [
        (boxes[package].bottom, boxes[one].top)
        for package, found in reduce(graph).items()
        for one in sorted(found)
    ]
    height = (max(rows) + 1) * ROW_HEIGHT
    return render_svg("The packages of csdctl and what they import", width, height, boxes.values(), arrows)


RANK, LINK = "rank", "link"
STEP = (
    ("tasks/train.py:Train.exchange_reassigned", RANK, "samples that the host reads for others"),
    ("data/prepared.py:EpochReader.read", RANK, "samples of this rank's share"),
    ("engine/step.py:StepEngine.local", RANK, "gradients, statistics, loss and n in one vector"),
    ("group/communicator.py:Communicator.sum", RANK, "shared memory, then the link"),
    ("group/link.py:serve_link", LINK, "two processes of an MPI job: node and host"),
    ("group/hub.py:Hub.serve", LINK, "adds in order of rank, and hands the sum back"),
    ("engine/step.py:StepEngine.apply", RANK, "divided by n, one optimizer step"),
    ("tasks/checkpointer.py:Checkpointer.after_step", RANK, "state that survives the process"),
    ("tasks/balancer.py:Balancer.decide", RANK, "batch sizes, from every rank's compute seconds"),
)
"""Data in a step: the function below csdctl/worker/, the process that calls it, and a note."""


def render_step() -> str:
    """Return the picture of a step as SVG."""
    width, wide = 690.0, 330.0
    boxes = [Box(GAP, GAP + row * 56, place, wide, who == RANK) for row, (place, who, _) in enumerate(STEP)]
    arrows = [(upper.bottom, lower.top) for upper, lower in pairwise(boxes)]
    notes = [
        f'<text x="{GAP + wide + 16}" y="{box.y + 21}" class="note">{escape(note)}</text>'
        for box, (*_, note) in zip(boxes, STEP, strict=True)
    ]
    return render_svg("Data in a training step", width, len(STEP) * 56 + GAP, boxes, arrows, notes)


def render_svg(
    title: str,
    width: float,
    height: float,
    boxes: Iterable[Box],
    arrows: Iterable[tuple[tuple[float, float], tuple[float, float]]],
    more: Iterable[str] = (),
) -> str:
    """Return boxes and arrows as an SVG text that is readable on light and dark pages."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>",
        "rect{fill:#eef2f7;stroke:#5b6b7f}rect.marked{fill:#e4f1e6;stroke:#4f7a58}",
        "text{font:12px sans-serif;text-anchor:middle;fill:#1b2733}.note{text-anchor:start;fill:#5b6b7f}",
        "path{fill:none;stroke:#8fa0b3}",
        "</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"',
        ' orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#8fa0b3;stroke:none"/></marker>',
    ]
    for (x1, y1), (x2, y2) in arrows:
        middle = (y1 + y2) / 2
        lines.append(
            f'<path d="M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}" '
            'marker-end="url(#tip)"/>'
        )
    for box in boxes:
        kind = ' class="marked"' if box.is_marked else ""
        lines += [
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{BOX_HEIGHT}" rx="5"{kind}/>',
            f'<text x="{box.top[0]:g}" y="{box.y + 21:g}">{escape(box.text)}</text>',
        ]
    return "\n".join([*lines, *more, "</svg>", ""])


def main() -> None:
    """Write both pictures."""
    (PICTURES / "packages.svg").write_text(render_packages())
    (PICTURES / "step.svg").write_text(render_step())


if __name__ == "__main__":
    main()
