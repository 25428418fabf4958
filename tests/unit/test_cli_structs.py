"""Commands that take structs: typer is shown their fields, the command gets structs."""

from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from tokenmill.shared.cli_structs import with_structs
from tokenmill.shared.cli_support import handle_errors
from tokenmill.shared.errors import InvalidRequest


class Where(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, typer.Argument()]
    port: Annotated[int, typer.Option(min=1)] = 80


class How(msgspec.Struct, frozen=True, kw_only=True):
    quick: Annotated[bool, typer.Option("--quick")] = False


@with_structs
@handle_errors
async def call(*, where: Where, how: How, as_json: bool = False) -> None:
    """Call somebody."""
    if how.quick:
        raise InvalidRequest("quick", "is not to be had")
    typer.echo(f"{where.name} {where.port} {as_json}")


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(call)
    return lambda *options: CliRunner().invoke(app, options)


def test_options_and_defaults_arrive_in_their_structs(run) -> None:
    assert run("mill").output == "mill 80 False\n"
    assert run("mill", "--port", "7", "--as-json").output == "mill 7 True\n"


def test_wrong_usage_is_told_as_without_structs(run) -> None:
    assert run().exit_code == 2
    assert run("mill", "--port", "0").exit_code == 2


def test_errors_take_the_form_that_the_command_was_asked_for(run) -> None:
    told = run("mill", "--quick", "--as-json")
    assert told.exit_code == InvalidRequest.exit_code
    assert '"field":"quick"' in told.stderr
