"""Asynchronous GRPO from the pieces of agentrl_train: episodes are played while the learner works."""

import asyncio
import itertools
from pathlib import Path
from statistics import fmean

import agentrl_train as rl
from agentrl_env import EnvClient

EXAMPLES = Path(__file__).parents[1]
STARTER, TASK = str(EXAMPLES / "quickstart/starter"), str(EXAMPLES.parent / "environments/household")
GROUPS, SIBLINGS, CONTEXT = 8, 8, 512


async def train(steps: int) -> list[float]:
    """Train the starter on the household and return the success rate of each step."""
    (policy, tokenizer), (sampled, _) = rl.load_policy(STARTER), rl.load_policy(STARTER)
    chat = rl.ChatFormat(tokenizer)
    engine = rl.TorchEngine(
        {"current": sampled}, stop_token_ids=chat.stop_token_ids, max_sequences=128, max_context=CONTEXT
    )
    learner = rl.Learner(policy, rl.TrainSection(learning_rate=7e-4, max_grad_norm=0.1))
    publisher, env = rl.Publisher(engine), EnvClient.local(TASK)
    actor = rl.Actor(
        engine=engine,
        chat=chat,
        clients={"household": env},
        sampling=rl.Sampling(max_context=CONTEXT, max_new_tokens=48),
    )
    finished: asyncio.Queue[rl.TrajectoryGroup] = asyncio.Queue(maxsize=1)  # bounds the staleness
    numbers, version, success = itertools.count(), 0, []

    async def play() -> None:
        for i in numbers:
            episode = rl.Episode(task="household", split="train", index=i, seed=None, draw_seed=(0, i))
            group, _ = await actor.group(episode, size=SIBLINGS, group_id=i, admitted_version=version)
            await finished.put(group)

    players = [asyncio.create_task(play()) for _ in range(GROUPS)]
    while version < steps:
        groups = [await finished.get() for _ in range(GROUPS)]
        rows = rl.sequences(groups, rl.advantages(groups))
        batches = rl.pack(rows, max_tokens=2048, num_minibatches=2, seed=version, version=version)
        await asyncio.to_thread(learner.step, batches)
        version += 1
        await asyncio.to_thread(publisher.publish, learner.weights(), policy_version=version)
        success.append(fmean(episode.success for group in groups for episode in group.trajectories))
        print(f"step {version}: success {success[-1]:.0%}", flush=True)
    [player.cancel() for player in players]
    await asyncio.gather(*players, engine.close(), env.aclose(), return_exceptions=True)
    return success


if __name__ == "__main__":
    asyncio.run(train(20))
