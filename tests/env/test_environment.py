import pytest

from agentrl_env import Environment, TaskSample, tool
from agentrl_env.errors import NotSupported
from agentrl_env.tools import Reply
from tests.env.tasks import Guess, Quick, Slow


class HTTPShop(Environment):
    """Named in
    two lines."""

    def reset(self, sample, rng):
        return ""


class Named(Guess):
    name = "my-guess"


class Renamed(Named):
    pass


def test_name_defaults_to_the_class_name_in_snake_case():
    assert Guess.name == "guess"
    assert HTTPShop.name == "http_shop"
    assert Named.name == "my-guess"
    assert Renamed.name == "renamed"


def test_description_is_the_docstring():
    assert HTTPShop.description() == "Named in\ntwo lines."


def test_tool_specs_list_the_tools():
    assert [spec.function.name for spec in Guess.tool_specs()] == ["guess"]


def test_reset_is_required():
    class Incomplete(Environment):
        pass

    with pytest.raises(TypeError, match="reset"):
        Incomplete()


def test_hooks_can_be_overridden():
    assert Slow.overrides("close")
    assert not Guess.overrides("close")
    assert Guess.overrides("expert")
    assert Quick.overrides("samples")
    assert not Guess.overrides("samples")
    assert Named.overrides("expert")


def test_hooks_have_defaults():
    environment = Quick()
    assert environment.score() == {}
    environment.close()
    Quick.startup()
    Quick.shutdown()
    with pytest.raises(NotSupported, match="no expert"):
        HTTPShop().expert(None)
    with pytest.raises(NotSupported, match="no snapshot"):
        environment.snapshot()
    with pytest.raises(NotSupported, match="no snapshot"):
        environment.restore(None)


def test_default_respond_names_the_tools():
    reply = Guess().respond("hello")
    assert reply == Reply("Call one of the tools: guess.", metrics={"invalid_calls": 1.0})


def test_default_samples_are_endless_and_empty():
    assert Guess.samples("train")[10**12] == {}
    assert not hasattr(Guess.samples("train"), "__len__")


def test_environment_can_be_called_directly():
    class Adder(Environment):
        def reset(self, sample, rng):
            self.total = sample.data["start"]
            return ""

        @tool
        def add(self, n: int):
            self.total += n
            return str(self.total)

    adder = Adder()
    adder.reset(TaskSample(task="adder", data={"start": 2}), None)
    assert adder.add(3) == "5"
