"""Tasks for agentrl-worker, loaded by its process."""

import asyncio
import json
import os

from agentrl.worker.task import Task
from agentrl.worker.typings import RewardHistoryItem, SampleStatus, TaskSampleExecutionResult

ADD = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Give the sum.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


class Sums(Task):
    """Ask for sums. The text of a message without a tool call selects a failure."""

    def __init__(self, indices=None, **options):
        super().__init__(tools=None, full_async=True, **options)
        self.indices = indices or list(range(10))

    def get_indices(self):
        return self.indices

    async def start_sample(self, index, session):
        if index in ("finished", "broken"):
            session.inject(RewardHistoryItem(reward=0.5, score=0.5, metrics={"early": 1.0}))
            if index == "broken":
                raise RuntimeError("the set-up failed")
            return TaskSampleExecutionResult(status=SampleStatus.COMPLETED, result="done")
        n = self.indices.index(index) if index in self.indices else 0
        return await self.play(n, session)

    async def start_sample_custom(self, task, session):
        return await self.play(int(task["n"]), session)

    async def play(self, n, session):
        session.set_tools([ADD])
        session.inject({"role": "system", "content": "Add."})
        message = {"role": "user", "content": f"{n} + {n}?"}
        for _ in range(4):
            output = await session.action(message)
            said = output.messages[-1]
            calls = said.get("tool_calls") or []
            if not calls:
                message = await self.obey(said.get("content"))
                if isinstance(message, TaskSampleExecutionResult):
                    return message
                continue
            given = json.loads(calls[0]["function"]["arguments"])["n"]
            right = given == 2 * n
            text = "right" if right else "wrong"
            message = {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}
            session.inject(
                RewardHistoryItem(reward=float(right), score=float(right), metrics={"given": given})
            )
            if right:
                session.inject(message)
                return TaskSampleExecutionResult(status=SampleStatus.COMPLETED)
        return TaskSampleExecutionResult(status=SampleStatus.TASK_LIMIT_REACHED)

    async def obey(self, text):
        if text == "raise":
            raise RuntimeError("a bug of the task")
        if text == "die":
            os._exit(3)
        if text == "hang":
            await asyncio.Event().wait()
        if text == "invalid":
            return TaskSampleExecutionResult(status=SampleStatus.AGENT_INVALID_ACTION)
        if text == "context":
            return TaskSampleExecutionResult(status=SampleStatus.AGENT_CONTEXT_LIMIT)
        return {"role": "user", "content": "Use the tool."}
