"""Commands with a settings model have an option for each of its fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from pydantic import BaseModel, ConfigDict

from agentrl_env.cli.settings import settings_as_options

Size = Annotated[int, typer.Option("--size", "-s", min=1, help="The size.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Options that two commands share."""

    verbose: Annotated[bool, typer.Option("--verbose", help="Print more.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemory(Shared):
    """Options of a command, with an argument."""

    name: Annotated[str, typer.Argument(help="The name.")]
    size: Size = 3


class FromFile(BaseModel):
    """The same options as a pydantic model."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, typer.Argument(help="The name.")]
    size: Size = 3
    verbose: Annotated[bool, typer.Option("--verbose", help="Print more.")] = False


def command_of(model):
    """Return a Typer command with the settings, and the list of its calls."""
    calls = []

    def show(context: typer.Context, settings: model) -> None:
        """Show a thing."""
        calls.append((context.info_name, settings))

    app = typer.Typer(add_completion=False)
    app.command()(settings_as_options(show))
    return typer.main.get_command(app), calls


@pytest.mark.parametrize("model", [InMemory, FromFile])
def test_command_gets_its_settings_from_the_command_line_and_the_defaults(model):
    command, calls = command_of(model)
    command(["box", "-s", "7"], prog_name="show", standalone_mode=False)
    command(["box", "--verbose"], prog_name="show", standalone_mode=False)
    assert calls == [
        ("show", model(name="box", size=7, verbose=False)),
        ("show", model(name="box", size=3, verbose=True)),
    ]


@pytest.mark.parametrize("model", [InMemory, FromFile])
def test_options_have_the_descriptions_and_limits_of_the_fields(model):
    command, _ = command_of(model)
    options = {option.name: option for option in command.params if option.name != "help"}
    assert list(options) == ["name", "size", "verbose"]
    assert (options["size"].opts, options["size"].help, options["size"].default) == (
        ["--size", "-s"],
        "The size.",
        3,
    )
    assert command.help == "Show a thing."


def test_value_outside_the_limits_of_its_field_is_refused():
    command, calls = command_of(InMemory)
    with pytest.raises(typer.BadParameter, match="greater than or equal to 1"):
        command(["box", "--size", "0"], prog_name="show", standalone_mode=False)
    assert calls == []
