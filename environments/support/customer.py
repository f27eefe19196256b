"""The customer: a program with rules, or instructions for a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl_env.users import Endpoint, FunctionUser, ModelUser, User, UserCall, Utterance

from .device import Device
from .problem import Problem
from .tools import DeskTools

ASKING = re.compile(r"\?|\b(please|tell me|give me|let me know|i need|provide|share|may i have)\b")
DONE = re.compile(
    r"\b(has|have) (now |just |already )?been\b|\b(is|are) now\b|\ball (done|set)\b"
    r"|\bi(?:'ve| have) (just )?(cancel|chang|updat|register|return|exchang|sent|process|arrang"
    r"|book|rebook|add|mov|correct)\w*"
)
REFUSED = re.compile(
    r"\b(can ?not|can't|unable|not (able|possible|allowed|eligible)|too late|no longer|unfortunately|sorry)\b"
)
SYMPATHY = re.compile(r"\bsorry (to|for|about|that)\b[^.!?]*")
"""Words about a fault of the device that are not a refusal."""
ANYTHING_ELSE = re.compile(r"\b(anything|something) else\b")
CONFIRM = re.compile(
    r"\b(confirm|go ahead|proceed|shall i|should i|would you like me|do you want me|is that (right|correct))"
)
PATIENCE = 3
"""The customer gives up after this many consecutive messages that it does not understand."""
THANKS, AGAIN, BYE = "Thank you.", "I see.", "That is all. Goodbye."
LOST = "I do not understand. Can you do it, or what do you need from me?"
GIVES_UP = "This does not help me. I will try again another time."


def make_customer(problem: Problem, endpoint: Endpoint | None, *, seed: int, desk: DeskTools) -> User:
    """Return the customer of a problem: a model if there is an endpoint, or else a program with rules."""
    text = instructions(problem)

    def device() -> Device | None:
        return problem.device(desk)

    if endpoint is not None:
        return ModelUser(text, endpoint, tools=device if device() is not None else None, seed=seed)
    return FunctionUser(Customer(problem, device), instructions=text)


def instructions(problem: Problem) -> str:
    """Return what the customer wants and knows."""
    wishes = []
    for number, request in enumerate(problem.requests, start=1):
        facts = " ".join(request.facts.values())
        known = f" Only if you are asked: {facts}" if problem.level > 1 and facts else ""
        wishes.append(f"{number}. {request.opening}{known}")
    return problem.instructions.format(
        **problem.customer["name"], identity=problem.identity, requests="\n".join(wishes)
    )


class Customer:
    """A customer with rules. Its answer depends only on the dialogue.

    It answers questions, follows instructions for its device, states its next request when the last one is
    settled or refused, and says goodbye after the last request.

    Args:
        problem: The problem.
        device: Returns the customer's device in its state before the dialogue.
    """

    def __init__(self, problem: Problem, device: Callable[[], Device | None]) -> None:
        self._requests, self._device = problem.requests, device
        self._topics = {topic: re.compile(pattern) for topic, pattern in problem.topics.items()}
        self._facts = [{"identity": problem.identity, **request.facts} for request in problem.requests]
        actions = rf"|\bi(?:'ve| have) (?:now |just |already )?(?:{problem.actions})\w*"
        self._done = re.compile(DONE.pattern + actions * bool(problem.actions))

    def __call__(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the next message."""
        stage, lost, said = 0, 0, Utterance(text=f"Hello. {self._requests[0].opening}")
        for number, line in enumerate(dialogue):
            if line.speaker != "assistant":
                continue
            heard, answered = line.text.lower(), dialogue[number + 1 : number + 2]
            if self._requests[stage].on_device:
                heard = SYMPATHY.sub("", heard)
            # Use the recorded results, because a test of the device might have another result now.
            uses = answered[0].calls if answered else self._use(dialogue, heard, stage)
            answer = " ".join([self._answer(heard, stage), *(own.answer for own in uses)]).strip()
            if self._is_settled(uses, stage):
                stage, lost, said = stage + 1, 0, self._next(stage + 1, f"{answer} {THANKS}")
            elif answer:
                lost, said = 0, Utterance(text=answer)
            elif self._done.search(heard) or REFUSED.search(heard) or ANYTHING_ELSE.search(heard):
                words = AGAIN if self._is_refusal(heard) else THANKS
                stage, lost, said = stage + 1, 0, self._next(stage + 1, words)
            elif CONFIRM.search(heard):
                lost, said = 0, Utterance(text="Yes, please.")
            else:
                lost += 1
                gives_up = lost >= PATIENCE
                said = Utterance(text=GIVES_UP if gives_up else LOST, ends=gives_up)
            said = said.model_copy(update={"calls": tuple(uses)})
        return said

    def _answer(self, heard: str, stage: int) -> str:
        """Return the answers to the questions of a message, or "" if it has no questions."""
        if not ASKING.search(heard) or self._done.search(heard):
            return ""
        asked = [part for part in re.split(r"(?<=[.?!])\s+", heard) if ASKING.search(part)]
        facts = self._facts[stage]
        topics = [topic for topic in facts if any(self._topics[topic].search(part) for part in asked)]
        return " ".join(facts[topic] for topic in topics)

    def _use(self, dialogue: Sequence[Utterance], heard: str, stage: int) -> list[UserCall]:
        """Use the device as the last message requests, and return the calls."""
        if (device := self._device()) is None:
            return []
        device = device.after(dialogue)
        uses = device.hear([line.text for line in dialogue if line.speaker == "assistant"])
        if not self._requests[stage].on_device:
            uses = [use for use in uses if use[0] != device.test]
        elif not uses and not self._is_refusal(heard):
            uses = [(device.test, {})] * bool(self._done.search(heard) or ANYTHING_ELSE.search(heard))
        return [device.use(tool, given, number) for number, (tool, given) in enumerate(uses)]

    def _is_settled(self, uses: Sequence[UserCall], stage: int) -> bool:
        """Return True if the request is about the device, and a test has shown that it works."""
        if not self._requests[stage].on_device or (device := self._device()) is None:
            return False
        return any(own.call.function.name == device.test and device.works(own.answer) for own in uses)

    def _is_refusal(self, heard: str) -> bool:
        return bool(REFUSED.search(heard)) and not self._done.search(heard)

    def _next(self, stage: int, words: str) -> Utterance:
        if stage == len(self._requests):
            return Utterance(text=f"{words} {BYE}", ends=True)
        return Utterance(text=f"{words} {self._requests[stage].opening}")
