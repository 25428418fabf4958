"""The group `tokenmill lora`, to which more than one folder adds commands."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import typer

_NAME: Final = "lora"


def lora_group(app: "typer.Typer") -> "typer.Typer":
    """Returns the group of commands for adapters, made on the first call.

    Args:
        app: The command `tokenmill`.
    """
    import typer

    for group in app.registered_groups:
        if group.name == _NAME and group.typer_instance is not None:
            return group.typer_instance
    made = typer.Typer(help="LoRA adapters of models.", no_args_is_help=True)
    app.add_typer(made, name=_NAME)
    return made
