"""What a worker says about an error of the user's code."""

import re
from pathlib import Path

import keras
import pytest

from csdctl.worker.process.errors import describe, find_remedy


def error_of(text: str, file: str = "user.py") -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(text, file, "exec"), {"keras": keras})
    return caught.value


def test_description_names_the_line_of_the_users_file() -> None:
    error = error_of("def go():\n    return 1 / 0\n\n\ngo()\n")
    assert describe(error, Path("user.py")) == "ZeroDivisionError: division by zero (line 2)"
    assert describe(error, Path("other.py")) == describe(error) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("from keras.utils import np_utils", "in Keras 3 write keras.utils"),
        ("keras.optimizers.Adam(lr=0.1)", "in Keras 3 write learning_rate"),
        (
            "from keras.preprocessing.image import ImageDataGenerator",
            "in Keras 3 write tensorflow.keras.preprocessing.image",
        ),
        ("from keras.layers.embeddings import Embedding", "in Keras 3 write keras.layers"),
        ("keras.backend.flatten", "in Keras 3 write keras.ops"),
        ("import no_such_module", "install the module on this machine"),
        ("1 / 0", "^$"),
    ],
)
def test_names_of_keras_2_have_a_replacement(text: str, remedy: str) -> None:
    assert re.search(remedy, find_remedy(error_of(text)))
