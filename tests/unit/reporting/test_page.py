"""The HTML report and the CSV, of a run whose node has an unpleasant name."""

import csv
import html
import io
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from csdctl.notify import make_printable
from csdctl.placement.equation1 import Placed
from csdctl.reporting.page import _shares, render_page
from csdctl.reporting.privacy import PassCounter
from csdctl.reporting.results import RunFollower, RunResults, read_results, summarize
from csdctl.reporting.series import KINDS, SeriesBuilder
from csdctl.reporting.tables import describe_settings
from csdctl.runs.directory import Manifest
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Failed, Joined, Progress, Ready
from csdctl.workflows.reporting.report import render_csv
from tests.watched_run import write_run

EVIL = "<script>alert(1)</script>\" onload='x' $x^2$ &amp; ]]>"
NODES = ("host", EVIL)
RANKS = [RankPlan(node=node, batch_size=10, threads=4, samples_per_s=15.0) for node in NODES]
MANIFEST = Manifest.model_construct(
    csdctl="0.1.0",
    job={"model": EVIL},
    versions={EVIL: EVIL},
    plan=Plan.model_construct(emulated=True, method=EVIL, ranks=RANKS),
    placed=[Placed("host", 60, 0, 0, 600), Placed(EVIL, 10, 40, 600, 660)],
)


def results(run_id: str = "=HYPERLINK(1)", cell: str = "=cmd()") -> RunResults:
    events: list[Event] = [
        *(Ready(rank, NODES[rank], 100) for rank in (0, 1)),
        Joined(0, "host", 1, 0, 10, 0, {"0": 60, "1": 10}, is_start=True),
        *(Progress(rank, NODES[rank], 1, 5, 5, 300, 3.0, 1.5, 5.0) for rank in (0, 1)),
        Failed(1, EVIL, EVIL),
    ]
    for epoch in (1, 2):
        events.append(EpochEnd(1, EVIL, epoch, 10, 100, 9.0, 1.0, 10.0, "hash"))
        end = EpochEnd(0, "host", epoch, 10, 600, 6.0, 3.0, 10.0, "hash", 700, 2.0 / epoch, 0.5)
        events.append(replace(end, metrics={EVIL: 0.5, cell: 1.0}))
    builder = SeriesBuilder(NODES)
    follower = RunFollower(PassCounter(len(NODES)))
    for number, event in enumerate(events):
        builder.add(1e9 + number, event)
        follower.add(event)
    return RunResults(summarize(run_id, MANIFEST, follower), builder.build(), MANIFEST)


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def text() -> str:
    return render_page([results()])


def test_text_of_nodes_and_jobs_makes_no_tag_and_no_attribute_and_the_page_refers_to_itself_alone(
    text: str,
) -> None:
    page = Page(text)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)" in text  # it is shown
    references = ("src", "href", "action", "data", "poster", "srcset")
    values = [value for name, value in page.attributes if name in references]
    assert [value[:40] for value in values if not value.startswith(("#", "data:image/svg+xml;base64,"))] == []
    assert "@import" not in text
    assert "url(h" not in text
    assert "default-src &#x27;none&#x27;" in text


def test_each_chart_has_a_text_and_its_data(text: str) -> None:
    page = Page(text)
    charts = page.tags.count("img")
    assert charts == 6  # loss, accuracy, two metrics; speed, lanes
    assert page.tags.count("figure") == page.tags.count("details") == charts
    assert len([1 for name, value in page.attributes if name == "alt" and value]) == charts


def test_page_begins_with_its_headline_and_leaves_out_what_is_empty(text: str) -> None:
    names = [text.index(f"<dt>{name}<dd>") for name in ("result", "held back by", "next")]
    assert names == sorted(names)
    assert names[-1] < text.index("<h2>")
    assert "<h2>Energy" not in text
    assert "<h2>Faults" in text
    assert "TensorFlow" not in text  # of no machine
    assert text.count("emulated fleet") == 1


def test_numbers_are_right_aligned_also_in_the_first_column(text: str) -> None:
    assert '<th scope="col" class=n>epoch</th>' in text
    assert '<tr><th scope="row" class=n>1</th>' in text
    assert f'<tr><th scope="row">{html.escape(f"1 {EVIL}")}</th>' in text


def test_reports_that_overlap_in_time_stay_in_their_lane() -> None:
    spent = ({kind: [0.6] for kind in KINDS}, {kind: [0.1] for kind in KINDS})
    shares = [_shares(of, kind, 1.0) for of in spent for kind in KINDS]
    assert sum(share for (share,) in shares[: len(KINDS)]) == pytest.approx(1.0)
    assert sum(share for (share,) in shares[len(KINDS) :]) == pytest.approx(0.5)


def test_run_that_ended_in_its_first_epoch_has_the_rates_and_waiting_of_its_ranks(tmp_path: Path) -> None:
    read = read_results(write_run(tmp_path, 4))
    assert read.summary.epochs == 0
    assert [round(rank.waiting, 2) for rank in read.summary.ranks] == [0.58, 0.58, 0.58, 0.03]
    assert read.summary.samples_per_s > 0


def test_recipe_is_shown_where_it_differs_from_its_defaults() -> None:
    recipe = {"epochs": 5, "seed": 0, "learning_rate": 0.015, "early_stopping": None, "optimizer": "sgd"}
    settings = dict(
        describe_settings(replace(results(), manifest=MANIFEST.model_copy(update={"recipe": recipe})))
    )
    assert settings["recipe"] == 'epochs: 5, learning_rate: 0.015, optimizer: "sgd"'


@pytest.mark.parametrize("end", ["", "\x1b[2J", "\u202e"])
@pytest.mark.parametrize("begin", [*"=+-@\t\r\n"])
def test_csv_has_a_row_for_each_epoch_and_neither_formula_nor_control_character(begin: str, end: str) -> None:
    text = render_csv([results(cell=f"{begin}cmd(){end}"), results("b")])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len(rows) == 5
    assert [row[0] for row in rows] == ["run", *["'=HYPERLINK(1)"] * 2, "b", "b"]
    assert [name for name in rows[0] if "cmd()" in name and not name.startswith("'")] == []
    assert make_printable(text) == text
    assert rows[1][rows[0].index("loss")] == "2.0"
