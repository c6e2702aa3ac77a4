"""From a plan to a trained model: `train`, `train --resume` and `verify`."""
