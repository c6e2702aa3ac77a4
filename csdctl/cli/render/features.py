"""The output of `csdctl extract`."""

from csdctl.cli.render.preparing import PreparationScreen
from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.deliver import Delivery
from csdctl.workflows.train.strategies.features import FeatureRun


class ExtractScreen(PreparationScreen):
    """Shows messages, the progress, and what was sent."""

    def on_delivery(self, node: str, delivery: Delivery) -> None:
        """Show what was sent to a node."""
        if delivery.num_sent:
            self.say(f"{node}: {delivery.num_sent} files sent ({format_bytes(delivery.bytes_sent)})")


def extract_document(found: FeatureRun) -> dict[str, object]:
    """Return the `csdctl.extract/1` document."""
    return {
        "schema": "csdctl.extract/1",
        "layer": found.layer,
        "shape": list(found.shape),
        "precision": found.precision,
        "num_samples": found.num_samples,
        "num_computed": found.num_computed,
        "elapsed_s": found.elapsed_s,
    }
