"""The HTML report in a real browser: no message on its console, no request, every chart drawn and readable.

Needs Debian's chromium. Where it is missing, the tests of this file alone are skipped.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from csdctl.reporting.page import render_page
from tests.needs import require
from tests.patience import scaled
from tests.unit.reporting.test_page import results

PROBE = """<script>
addEventListener("securitypolicyviolation", e => console.log("PROBE violation " + e.violatedDirective));
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(details => details.open = true);
  const charts = [...document.querySelectorAll("figure")].map(figure => ({
    width: figure.querySelector("img").getBoundingClientRect().width,
    drawn: figure.querySelector("img").naturalWidth,
    rows: figure.querySelectorAll("details tbody tr").length,
  }));
  const requests = performance.getEntriesByType("resource").length;
  const page = document.documentElement.scrollWidth;
  console.log("PROBE " + JSON.stringify({charts, requests, page, window: innerWidth}));
});
</script>"""
"""Added to a copy of the page, whose policy is loosened for it."""


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_page_in_a_browser(tmp_path: Path, width: int) -> None:
    require("chromium")
    page = tmp_path / "report.html"
    text = render_page([results(), results("20260102-000000-beef")])
    loosened = text.replace("default-src", "script-src &#x27;unsafe-inline&#x27;; default-src", 1)
    page.write_text(loosened.replace("</head>", PROBE + "</head>", 1))
    command = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *(f"--user-data-dir={tmp_path}", f"--window-size={width},1000", f"--timeout={scaled(20_000):.0f}"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
    probed = json.loads(line.removeprefix("PROBE ").replace('\\"', '"'))
    assert len(probed["charts"]) > 6
    for chart in probed["charts"]:
        assert chart["drawn"] > 0
        assert chart["rows"] >= 1
        assert chart["width"] > min(250, width / 2)
    assert probed["requests"] == 0
    assert probed["page"] <= probed["window"]  # tables scroll, the page does not
