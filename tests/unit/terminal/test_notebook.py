"""Live views in a notebook: what they send to it. tests/emulated/test_notebook.py shows them in a kernel."""

import io

from rich.text import Text

from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.view import live_on, render_bundle


def test_bundle_is_html_and_plain_text() -> None:
    bundle = render_bundle(Text("epoch 1", style="bold"), width=40)
    assert bundle["text/plain"] == "epoch 1\n"
    assert bundle["text/html"].startswith("<pre ")
    assert "font-weight: bold" in bundle["text/html"]


def test_text_of_others_is_no_markup_and_no_control_code() -> None:
    bundle = render_bundle(Text("<script>alert(1)</script> \x1b]8;;x\x1b\\ \u202e"), width=80)
    assert "<script>" not in bundle["text/html"]
    assert "&lt;script&gt;" in bundle["text/html"]
    for text in bundle.values():
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_no_view_without_notebook_and_terminal() -> None:
    console = PrintableConsole(file=io.StringIO())
    assert not console.is_notebook
    assert live_on(console, lambda: Text("")) is None
