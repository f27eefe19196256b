"""Rewards of a test run: a pure function, and a judge with its address in the environment."""

import os

from agentrl_train.reward import Judge, answer, repetition, reward

JUDGE = Judge(os.environ["JUDGE_URL"], "judge", prompt="Score this: {text}", cache=os.environ["JUDGE_CACHE"])


@reward
def varied(trajectory):  # type: ignore[no-untyped-def]
    return -repetition(answer(trajectory), 1)


@reward
async def judged(trajectory):  # type: ignore[no-untyped-def]
    return await JUDGE(text=answer(trajectory))
