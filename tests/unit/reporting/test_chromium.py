"""The HTML report in a real browser: no message on its console, no request, every chart drawn and readable.

Needs Debian's chromium; where it is missing, the tests of this file alone are skipped.
"""

import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.reporting.page import render_page
from tests.needs import require
from tests.patience import scaled
from tests.unit.reporting.test_page import results

WIDTHS = (400, 800, 1400)
PROBE = """<script>
addEventListener("securitypolicyviolation", e => console.log("PROBE violation " + e.violatedDirective));
addEventListener("load", () => {
  const root = document.documentElement;
  document.querySelectorAll("details").forEach(details => details.open = true);
  const charts = [...document.querySelectorAll("figure")].map(figure => ({
    width: figure.querySelector("img").getBoundingClientRect().width,
    drawn: figure.querySelector("img").naturalWidth,
    rows: figure.querySelectorAll("details tbody tr").length,
  }));
  const requests = performance.getEntriesByType("resource").length;
  console.log("PROBE " + JSON.stringify({charts, requests, page: root.scrollWidth, window: innerWidth}));
});
</script>"""
"""Added to a copy of the page, whose policy is loosened for it."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The page and its probed copy, from a server that records what is asked of it."""
    directory = tmp_path_factory.mktemp("page")
    text = render_page([results(), results("20260102-000000-beef")])
    (directory / "report.html").write_text(text)
    loosened = text.replace("default-src", "script-src &#x27;unsafe-inline&#x27;; default-src", 1)
    (directory / "probed.html").write_text(loosened.replace("</head>", PROBE + "</head>", 1))
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            asked.append(str(arguments[0]).split()[1] if arguments else format)

    def handler(*arguments: object) -> Handler:
        return Handler(*arguments, directory=str(directory))  # type: ignore[arg-type]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def browse(address: str, profile: Path, width: int) -> list[str]:
    """Open a page; returns the lines of its console."""
    require("chromium")
    command = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *(
            f"--user-data-dir={profile}",
            f"--window-size={width},1000",
            f"--timeout={scaled(20_000):.0f}",
            "--dump-dom",
        ),
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)


@pytest.mark.parametrize("width", WIDTHS)
def test_page_in_a_browser(address: tuple[str, list[str]], tmp_path: Path, width: int) -> None:
    url, _ = address
    (line,) = browse(f"{url}/probed.html", tmp_path, width)
    found = json.loads(line.removeprefix("PROBE ").replace('\\"', '"'))
    assert len(found["charts"]) > 8
    for chart in found["charts"]:
        assert chart["drawn"] > 0
        assert chart["rows"] >= 1
        assert chart["width"] > min(250, width / 2)
    assert found["requests"] == 0
    assert found["page"] <= found["window"]  # tables scroll, the page does not
