"""The customer: a program with rules, or instructions for a model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl_env.users import Endpoint, FunctionUser, ModelUser, User, Utterance

from .problem import Problem

ASKING = re.compile(r"\?|\b(please|tell me|give me|let me know|i need|provide|share|may i have)\b")
DONE = re.compile(
    r"\b(has|have) (now |just |already )?been\b|\b(is|are) now\b|\ball (done|set)\b"
    r"|\bi(?:'ve| have) (just )?(cancel|chang|updat|register|return|exchang|sent|process|arrang"
    r"|book|rebook|add|mov|correct)\w*"
)
REFUSED = re.compile(
    r"\b(can ?not|can't|unable|not (able|possible|allowed|eligible)|too late|no longer|unfortunately|sorry)\b"
)
ANYTHING_ELSE = re.compile(r"\b(anything|something) else\b")
CONFIRM = re.compile(
    r"\b(confirm|go ahead|proceed|shall i|should i|would you like me|do you want me|is that (right|correct))"
)
PATIENCE = 3
"""Messages that the customer does not understand, in a row, before it gives up."""
THANKS, AGAIN, BYE = "Thank you.", "I see.", "That is all. Goodbye."
LOST = "I do not understand. Can you do it, or what do you need from me?"
GIVES_UP = "This does not help me. I will try again another time."


def make_customer(problem: Problem, endpoint: Endpoint | None, *, seed: int) -> User:
    """Return the customer of a problem: a model if there is an endpoint, else a program with rules."""
    text = instructions(problem)
    if endpoint is not None:
        return ModelUser(text, endpoint, seed=seed)
    return FunctionUser(Customer(problem), instructions=text)


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
    """A customer with rules. Its answer follows from the dialogue alone.

    It answers the questions that it has answers for, states its next request when the last one is settled or
    refused, and says goodbye after the last.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self._openings = [request.opening for request in problem.requests]
        self._topics = {topic: re.compile(pattern) for topic, pattern in problem.topics.items()}
        self._facts = [{"identity": problem.identity, **request.facts} for request in problem.requests]

    def __call__(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the next message."""
        stage, lost, said = 0, 0, Utterance(text=f"Hello. {self._openings[0]}")
        for line in dialogue:
            if line.speaker != "assistant":
                continue
            heard = line.text.lower()
            if answer := self._answer(heard, stage):
                lost, said = 0, Utterance(text=answer)
            elif DONE.search(heard) or REFUSED.search(heard) or ANYTHING_ELSE.search(heard):
                refused = REFUSED.search(heard) and not DONE.search(heard)
                stage, lost, said = stage + 1, 0, self._next(stage + 1, AGAIN if refused else THANKS)
            elif CONFIRM.search(heard):
                lost, said = 0, Utterance(text="Yes, please.")
            else:
                lost += 1
                gives_up = lost >= PATIENCE
                said = Utterance(text=GIVES_UP if gives_up else LOST, ends=gives_up)
        return said

    def _answer(self, heard: str, stage: int) -> str:
        """Return the answers to the questions of a message; "" if it has none for this customer."""
        if not ASKING.search(heard) or DONE.search(heard):
            return ""
        asked = [part for part in re.split(r"(?<=[.?!])\s+", heard) if ASKING.search(part)]
        facts = self._facts[stage]
        topics = [topic for topic in facts if any(self._topics[topic].search(part) for part in asked)]
        return " ".join(facts[topic] for topic in topics)

    def _next(self, stage: int, words: str) -> Utterance:
        if stage == len(self._openings):
            return Utterance(text=f"{words} {BYE}", ends=True)
        return Utterance(text=f"{words} {self._openings[stage]}")
