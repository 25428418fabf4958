"""Says which extra to install where the model stack is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..shared.errors import ModelLoadError


@contextmanager
def model_stack() -> Iterator[None]:
    """Turns a missing package inside into an error that names the extra.

    Raises:
        ModelLoadError: A package of the `worker` extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"running a model needs the package '{error.name}', which is not "
            "installed: pip install 'tokenmill[worker]'"
        ) from error
