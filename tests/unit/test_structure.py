"""The tree of files: links stay inside of it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_links_lead_to_files_of_the_project() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    links = [ROOT / line.split("\t", 1)[1] for line in tracked if line.startswith("120000 ")]
    assert [
        f"{link.relative_to(ROOT)} -> {link.readlink()}"
        for link in links
        if not link.exists() or not link.resolve().is_relative_to(ROOT)
    ] == []
