"""Draws the HTML report in a browser, at two widths: report-*.png beside this.

    python docs/pictures/draw_report.py [DIRECTORY]

The runs are those of the tests, recorded or made of events: nothing trains. With a directory, the pages that
the documentation does not show are drawn there too. It needs Debian's chromium.
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).parents[2]
PICTURES = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from csdctl.reporting.page import render_page  # noqa: E402
from csdctl.reporting.results import read_results  # noqa: E402
from csdctl.runs.directory import RunDirectory  # noqa: E402
from tests.watched_run import write_run  # noqa: E402

RECORDED = ROOT / "tests/unit/reporting/recorded"
WIDTHS = (1200, 400)
"""In pixels of CSS."""
MAX_HEIGHT = 7000
"""Of the window; a picture ends with its page."""
MARGIN = 24
"""Pixels below the last line."""
COLORS = 160
"""Of a PNG, which is then small."""


def render_pages(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page; the first is the documentation's."""
    recorded = RunDirectory(directory / ".csdctl/runs/20261123-101320-412068")
    shutil.copytree(RECORDED, recorded.path)
    wide = write_run(directory, 37)
    manifest = json.loads(wide.manifest.read_text())
    facts = json.loads(recorded.manifest.read_text())["fleet"]["facts"]
    names = [rank["node"] for rank in manifest["plan"]["ranks"]]
    known = {name: facts["csd0" if name != "host" else name] | {"name": name} for name in names}
    wide.manifest.write_text(json.dumps(manifest | {"fleet": {"emulated": False, "facts": known}}))
    runs = [read_results(run) for run in (recorded, wide)]
    other = replace(runs[0], summary=replace(runs[0].summary, run_id="20261124-070112-093377"))
    yield "report", render_page(runs[:1])
    yield "report-wide", render_page(runs[1:])
    yield "report-two", render_page([runs[0], other])


def draw_page(page: Path, picture: Path, width: int) -> None:
    """Write a picture of a page, as a visitor sees it."""
    with tempfile.TemporaryDirectory() as profile:
        target = Path(profile, "page.png")
        subprocess.run(
            [
                *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
                *(f"--user-data-dir={profile}", f"--window-size={width},{MAX_HEIGHT}"),
                *(f"--screenshot={target}", page.as_uri()),
            ],
            check=True,
            capture_output=True,
        )
        data = io.BytesIO(target.read_bytes())
    image = Image.open(data).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    _, _, _, end = ImageChops.difference(image, empty).getbbox() or (0, 0, 0, image.height)
    whole = image.crop((0, 0, image.width, min(end + MARGIN, image.height)))
    whole.quantize(COLORS).save(picture, optimize=True)


def draw(directory: Path | None) -> None:
    """Draw the pages."""
    with tempfile.TemporaryDirectory() as project:
        for name, text in render_pages(Path(project)):
            if name != "report" and directory is None:
                continue
            page = Path(project, f"{name}.html")
            page.write_text(text)
            for width in WIDTHS:
                picture = (directory or PICTURES) / f"{name}-{width}.png"
                draw_page(page, picture, width)
                print(f"{picture} ({picture.stat().st_size >> 10} KiB)")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
