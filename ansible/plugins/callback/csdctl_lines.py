"""Print one line of JSON for each task on each node, and one at the end; for `csdctl provision`."""

from __future__ import annotations

import json

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: csdctl_lines
type: stdout
short_description: One line of JSON for each task on each node
description:
  - Prints C(csdctl {...}) lines, which C(csdctl provision) reads to show progress.
"""


class CallbackModule(CallbackBase):
    """The callback that Ansible loads by this name."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "csdctl_lines"

    def _line(self, **content):
        self._display.display(f"csdctl {json.dumps(content)}")

    def _task(self, result, state, message=""):
        name = result._task.get_name().rpartition(" : ")[2]
        self._line(event="task", node=result._host.get_name(), task=name, state=state, message=message)

    def v2_runner_on_ok(self, result):
        """Report a task that succeeded."""
        self._task(result, "changed" if result._result.get("changed") else "ok")

    def v2_runner_on_skipped(self, result):
        """Report a task that had nothing to do."""
        self._task(result, "skipped")

    def v2_runner_on_failed(self, result, ignore_errors=False):
        """Report a task that failed, with its last lines of explanation."""
        if ignore_errors:
            self._task(result, "ok")
            return
        found = result._result
        lines = [str(found.get(key) or "").strip() for key in ("stderr", "msg", "module_stderr", "stdout")]
        text = next((line for line in lines if line and line != "non-zero return code"), "no message")
        self._task(result, "failed", " ".join(line.strip() for line in text.splitlines()[-3:]))

    def v2_runner_on_unreachable(self, result):
        """Report a node that does not answer."""
        self._task(result, "unreachable", str(result._result.get("msg", "")).strip().replace("\n", " "))

    def v2_playbook_on_stats(self, stats):
        """Report the counts of each node."""
        nodes = {}
        for name in sorted(stats.processed):
            counts = stats.summarize(name)
            nodes[name] = {
                "ok": counts["ok"],
                "changed": counts["changed"],
                "failed": counts["failures"],
                "unreachable": counts["unreachable"],
                "skipped": counts["skipped"],
            }
        self._line(event="summary", nodes=nodes)
