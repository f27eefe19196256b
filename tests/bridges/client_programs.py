"""Agent programs on popular frameworks. Each computes a sum with a tool and then answers.

Each program imports its framework when called, so a missing framework skips only its own tests.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from agentrl_env.types import TaskSample

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise litellm downloads a price list
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")


class Sum(BaseModel):
    """The sum of two numbers."""

    value: int = Field(description="The sum.")


def _question(sample: TaskSample) -> str:
    return f"What is {sample.data['a']} + {sample.data['b']}? Use the tool add."


def _reward(sample: TaskSample, value: Any) -> float:
    return float(str(value).strip() == str(sample.data["a"] + sample.data["b"]))


def _smolagents(base_url: str, sample: TaskSample, kind: str) -> float:
    import smolagents

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = smolagents.OpenAIServerModel("policy", api_base=base_url, api_key="none")
    agent = getattr(smolagents, kind)(tools=[add], model=model, max_steps=4, verbosity_level=0)
    return _reward(sample, agent.run(_question(sample)))


def smolagents_tools(base_url: str, sample: TaskSample) -> float:
    """Play with smolagents' tool-calling agent."""
    return _smolagents(base_url, sample, "ToolCallingAgent")


def smolagents_code(base_url: str, sample: TaskSample) -> float:
    """Play with smolagents' code agent."""
    return _smolagents(base_url, sample, "CodeAgent")


async def _pydantic_ai(base_url: str, sample: TaskSample, model: Any) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import UnexpectedModelBehavior

    agent = Agent(model, output_type=Sum, retries=2)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    try:
        result = await agent.run(_question(sample))
    except UnexpectedModelBehavior:  # the model's mistake, which the reward reflects
        return 0.0
    return _reward(sample, result.output.value)


async def pydantic_ai(base_url: str, sample: TaskSample) -> float:
    """Play with pydantic-ai on chat completions, with an output type."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return await _pydantic_ai(base_url, sample, OpenAIChatModel("policy", provider=provider))


async def pydantic_ai_anthropic(base_url: str, sample: TaskSample) -> float:
    """Play with pydantic-ai on Anthropic's API, with an output type."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=base_url, api_key="none")
    return await _pydantic_ai(base_url, sample, AnthropicModel("policy", provider=provider))


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def litellm(base_url: str, sample: TaskSample) -> float:
    """Play with litellm's client in the usual loop."""
    import litellm as library

    messages: list[Any] = [{"role": "user", "content": _question(sample)}]
    while True:
        answer = library.completion(
            model="openai/policy", api_base=base_url, api_key="none", messages=messages, tools=[TOOL]
        )
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return _reward(sample, said.content)
        for call in said.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


def anthropic(base_url: str, sample: TaskSample) -> float:
    """Play with Anthropic's SDK in the usual loop."""
    from anthropic import Anthropic

    function = TOOL["function"]
    tool = {"name": "add", "description": function["description"], "input_schema": function["parameters"]}
    messages: list[Any] = [{"role": "user", "content": _question(sample)}]
    with Anthropic(base_url=base_url, api_key="none") as client:
        while True:
            said = client.messages.create(model="policy", max_tokens=200, tools=[tool], messages=messages)
            messages.append({"role": "assistant", "content": said.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                for block in said.content
                if block.type == "tool_use"
            ]
            if not results:
                return _reward(sample, said.content[0].text)
            messages.append({"role": "user", "content": results})


async def _create_agent(base_url: str, sample: TaskSample, strategy: str) -> float:
    from langchain.agents import create_agent as make
    from langchain.agents import structured_output
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatOpenAI(base_url=base_url, api_key="none", model="policy")
    agent = make(model, [add], response_format=getattr(structured_output, strategy)(Sum))
    state = await agent.ainvoke({"messages": [{"role": "user", "content": _question(sample)}]})
    return _reward(sample, state["structured_response"].value)


async def create_agent_tool(base_url: str, sample: TaskSample) -> float:
    """Play with LangChain's agent and structured output by a tool."""
    return await _create_agent(base_url, sample, "ToolStrategy")


async def create_agent_schema(base_url: str, sample: TaskSample) -> float:
    """Play with LangChain's agent and structured output by the endpoint."""
    return await _create_agent(base_url, sample, "ProviderStrategy")


async def _agents_sdk(base_url: str, sample: TaskSample, model_class: str) -> float:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = getattr(agents, model_class)(model="policy", openai_client=client)
        agent = agents.Agent(name="player", model=model, tools=[add], output_type=Sum)
        result = await agents.Runner.run(agent, _question(sample), max_turns=4)
    return _reward(sample, result.final_output.value)


async def agents_sdk(base_url: str, sample: TaskSample) -> float:
    """Play with the OpenAI Agents SDK on the Responses API, with an output type."""
    return await _agents_sdk(base_url, sample, "OpenAIResponsesModel")


async def agents_sdk_chat(base_url: str, sample: TaskSample) -> float:
    """Play with the OpenAI Agents SDK on chat completions, with an output type."""
    return await _agents_sdk(base_url, sample, "OpenAIChatCompletionsModel")


def mini_swe_agent(base_url: str, sample: TaskSample) -> float:
    """Play with mini-swe-agent's agent and prompts: shell commands, then a submission."""
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    asked = {"api_base": base_url, "api_key": "none"}
    model = LitellmModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        **settings["model"] | {"model_kwargs": settings["model"]["model_kwargs"] | asked},
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(timeout=10, **settings["environment"]),
        system_template=settings["agent"]["system_template"],
        instance_template=settings["agent"]["instance_template"],
        step_limit=4,
    )
    return _reward(sample, agent.run(_question(sample))["submission"])
