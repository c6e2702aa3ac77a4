"""The properties of a model and the rate of a probe."""

from csdctl.tuning.measurements import ModelProperties, describe_model
from csdctl.worker.protocol.model_info import ModelInfo


class TestFeatures:
    def test_features_are_those_of_the_model_that_was_built(self) -> None:
        info = ModelInfo(
            "keras.applications:MobileNetV2", (64, 64, 3), (200,), 7, 5, "softmax", num_operations=9
        )
        described = describe_model(info, "hash")
        assert described == ModelProperties("hash", info.name, 7, 5, 9, 12_288)
        assert (described.short_name, described.vector_bytes) == ("MobileNetV2", 20)

    def test_inputs_are_counted_unless_their_size_is_unknown(self) -> None:
        info = ModelInfo("a", (), (1,), 1, 1, "", inputs={"left": (2, 3), "right": (4,), "text": (0,)})
        assert describe_model(info, "hash").input_elements == 10
