"""The errors that a worker raises deliberately, and a description for unexpected ones."""


class WorkerError(Exception):
    """The worker cannot continue; the message and the remedy are shown to the user."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


class InputError(WorkerError):
    """The job, its code or its data must be changed; exit code 2."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy, exit_code=2)


def describe(error: BaseException) -> str:
    """Return type and first line of an error, without the pages of stack that Keras and TensorFlow append."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
