"""The one error that a worker raises on purpose, and how an unforeseen one is described."""


class WorkerError(Exception):
    """The worker cannot go on; the message and the remedy are for people."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


def describe(error: BaseException) -> str:
    """Type and first line of an error; Keras and TensorFlow add pages of their own stack to theirs."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
