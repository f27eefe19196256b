"""Agent programs on popular SDKs. Each plays a session of a served task with its tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client import ClientSession
from agentrl_env.types import FunctionCall, Message, TaskSample

set_tracing_disabled(True)


class Played:
    """A session and the results of its steps so far."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.prompt = "\n".join(str(message.content) for message in session.messages)
        self.reward = 0.0
        self.over = False

    async def step(self, action: Message | str) -> str:
        if self.over:
            return "The episode is over."
        result = await self.session.step(action)
        self.reward += result.reward
        self.over = result.final
        return "\n".join(str(message.content) for message in result.messages)

    async def call(self, name: str, arguments: str) -> str:
        function = FunctionCall(name=name, arguments=arguments)
        return await self.step(Message.assistant(None, ToolCall(id="call", function=function)))


@asynccontextmanager
async def playing(sample: TaskSample) -> AsyncIterator[Played]:
    async with (
        EnvClient.connect(sample.data["url"]) as client,
        await client.open(**sample.data["open"], wait=60) as session,
    ):
        yield Played(session)


async def openai_sdk(base_url: str, sample: TaskSample) -> float:
    """Play with the OpenAI SDK in the usual loop. Every second answer is streamed."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as model, playing(sample) as played:
        messages: list[Any] = [{"role": "user", "content": played.prompt}]
        tools = [tool.model_dump() for tool in played.session.tools]
        while not played.over:
            asked = {"model": "policy", "messages": messages, "tools": tools}
            if len(messages) % 4 == 1:
                answer = await _streamed(model, asked)
            else:
                answer = (await model.chat.completions.create(**asked)).choices[0].message
            messages.append(answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            for call in answer.tool_calls or ():
                said = await played.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if not answer.tool_calls:
                messages.append({"role": "user", "content": await played.step(answer.content or "")})
        return played.reward


async def _streamed(model: AsyncOpenAI, asked: dict[str, Any]) -> ChatCompletionMessage:
    """Return an answer that is streamed in chunks."""
    text, calls = "", []
    async for chunk in await model.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += [call.model_dump() for call in choice.delta.tool_calls or ()]
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": text or None, "tool_calls": calls or None}
    )


async def anthropic_sdk(base_url: str, sample: TaskSample) -> float:
    """Play with Anthropic's SDK in the usual loop. Every second answer is streamed."""
    async with AsyncAnthropic(base_url=base_url, api_key="none") as model, playing(sample) as played:
        messages: list[Any] = [{"role": "user", "content": played.prompt}]
        functions = [tool.function for tool in played.session.tools]
        tools = [
            {"name": one.name, "description": one.description, "input_schema": one.parameters}
            for one in functions
        ]
        while not played.over:
            asked: dict[str, Any] = {
                "model": "policy",
                "max_tokens": 400,
                "messages": messages,
                "tools": tools,
            }
            if len(messages) % 4 == 1:
                async with model.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await model.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": await played.call(block.name, json.dumps(block.input)),
                }
                for block in answer.content
                if block.type == "tool_use"
            ]
            text = "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "user", "content": results or await played.step(text)})
        return played.reward


async def _agents_sdk(base_url: str, sample: TaskSample, model_class: Any, *, streamed: bool) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client, playing(sample) as played:

        def tool(spec: Any) -> FunctionTool:
            async def invoke(context: Any, arguments: str) -> str:
                return await played.call(spec.name, arguments)

            return FunctionTool(
                name=spec.name,
                description=spec.description,
                params_json_schema=spec.parameters,
                on_invoke_tool=invoke,
                strict_json_schema=False,
            )

        def until_over(context: Any, results: Any) -> ToolsToFinalOutputResult:
            return ToolsToFinalOutputResult(is_final_output=played.over, final_output="over")

        agent = Agent(
            name="player",
            model=model_class(model="policy", openai_client=client),
            tools=[tool(spec.function) for spec in played.session.tools],
            tool_use_behavior=until_over,
        )
        try:
            if streamed:
                running = Runner.run_streamed(agent, played.prompt, max_turns=12)
                async for _ in running.stream_events():
                    pass
            else:
                await Runner.run(agent, played.prompt, max_turns=12)
        except (MaxTurnsExceeded, ModelBehaviorError):
            pass  # the model's mistake, which the reward reflects
        return played.reward


async def agents_sdk(base_url: str, sample: TaskSample) -> float:
    """Play with the OpenAI Agents SDK and its default, the Responses API."""
    return await _agents_sdk(base_url, sample, OpenAIResponsesModel, streamed=False)


async def agents_sdk_streamed(base_url: str, sample: TaskSample) -> float:
    """Play with the streaming OpenAI Agents SDK. Odd samples use chat completions, the rest Responses."""
    odd = isinstance(sample.index, int) and sample.index % 2
    model_class = OpenAIChatCompletionsModel if odd else OpenAIResponsesModel
    return await _agents_sdk(base_url, sample, model_class, streamed=True)


async def langgraph(base_url: str, sample: TaskSample) -> dict[str, Any]:
    """Play with a LangGraph graph: one node for the model and one for the tools."""
    async with playing(sample) as played:

        def tool(spec: Any) -> StructuredTool:
            async def invoke(**arguments: Any) -> str:
                return await played.call(spec.name, json.dumps(arguments))

            return StructuredTool(
                name=spec.name, description=spec.description, args_schema=spec.parameters, coroutine=invoke
            )

        tools = [tool(spec.function) for spec in played.session.tools]
        model = ChatOpenAI(base_url=base_url, api_key="none", model="policy").bind_tools(tools)

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        def after_model(state: MessagesState) -> str:
            return "tools" if state["messages"][-1].tool_calls else END

        def after_tools(state: MessagesState) -> str:
            return END if played.over else "model"

        graph = StateGraph(MessagesState)
        graph.add_node("model", ask)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", after_model)
        graph.add_conditional_edges("tools", after_tools)
        await graph.compile().ainvoke({"messages": [HumanMessage(played.prompt)]}, {"recursion_limit": 40})
        return {"reward": played.reward, "metrics": {"over": float(played.over)}}
