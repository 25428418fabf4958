"""Commands that take their options in structs.

A command line has forty options where a function has four parameters: typer reads a
signature, and one of forty parameters is read by nobody else.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

R = TypeVar("R")


def with_structs(command: Callable[..., R]) -> Callable[..., R]:
    """Decorates a typer command some of whose parameters are structs of options.

    Typer is shown the fields of such a struct, with their defaults, in its place; the
    command is called with the struct.

    Args:
        command: All its parameters are keyword-only.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters.values()
    structs = {one.name: one.annotation for one in parameters if _is_struct(one)}

    @functools.wraps(command)
    def wrapper(**given: object) -> R:
        for name, kind in structs.items():
            fields = {field: given.pop(field) for field in kind.__struct_fields__}
            given[name] = kind(**fields)
        return command(**given)

    def shown() -> Iterator[inspect.Parameter]:
        for one in parameters:
            if one.name in structs:
                yield from inspect.signature(one.annotation).parameters.values()
            else:
                yield one

    vars(wrapper)["__signature__"] = signature.replace(parameters=[*shown()])
    return wrapper


def _is_struct(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
