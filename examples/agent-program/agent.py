"""A custom agent: it searches a house with the OpenAI SDK and prints its reward."""

import asyncio
import json
import os

from openai import AsyncOpenAI

from agentrl_env import EnvClient, Message, ToolCall


async def main(sample):
    model = AsyncOpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
    house = EnvClient.connect(sample["data"]["url"])
    async with model, house, await house.open(**sample["data"]["open"]) as session:
        messages = [message.wire() for message in session.messages]
        tools = [tool.model_dump() for tool in session.tools]
        reward, over = 0.0, False
        while not over:
            answer = await model.chat.completions.create(model="policy", messages=messages, tools=tools)
            said = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
            calls = [ToolCall.model_validate(call) for call in said["tool_calls"] or ()]
            result = await session.step(Message.assistant(said["content"], *calls))
            reward, over = reward + result.reward, result.final
            messages += [said, *(message.wire() for message in result.messages)]
    print(json.dumps({"reward": reward, "metrics": dict(result.metrics)}))


with open(os.environ["AGENTRL_SAMPLE"]) as file:
    asyncio.run(main(json.load(file)))
