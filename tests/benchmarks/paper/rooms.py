"""The policy of the sweep ``workers``, which imitates clumsy readers, alone and as planners with workers.

    python -m tests.benchmarks.paper.rooms

prints the probability that the sweep's policies take the right word from a page.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl_env.types import Message, ToolCall, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.config import SubAgentSection, TrainSection
from agentrl_train.learner import Learner
from agentrl_train.loss import Loss, sft_loss
from agentrl_train.sft import train_sft
from agentrl_train.sub_agent import planner_tools, worker_opening, worker_tools
from agentrl_train.sweep.plan import load_sweep
from agentrl_train.sweep.statistics import share_interval
from agentrl_train.types import TokenSequence
from examples.quickstart.starter import new_model, new_tokenizer
from tests.benchmarks.paper.tasks import Rooms

MISTAKES = 0.4
"""Share of pages for which the readers report the wrong word."""
EPISODES = 6000
"""Episodes of these readers."""
STEPS = 900
"""Updates of the policy that imitates the readers."""
PAGES = 100
"""Pages for measuring a policy."""
Moves = Sequence[tuple[Message, str]]
"""An agent's messages, each with the result of its call."""


def write_reader(folder: Path) -> None:
    """Write model and tokenizer to a folder if they are missing."""
    if (folder / "tokenizer_config.json").exists():
        return
    torch.set_num_threads(1)  # another number of threads rounds differently
    sub_agent = workers()
    letters = ChatFormat(new_tokenizer([], vocab_size=0))
    heard = traces(letters, sub_agent, episodes=100)
    tokenizer = new_tokenizer([letters.tokenizer.decode(one.token_ids) for one in heard], vocab_size=1024)
    model = new_model(tokenizer, width=64, seed=0)
    learner = Learner(
        model,
        TrainSection(
            learning_rate=3e-3,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            warmup_steps=20,
            decay={"to": 0.05, "over": 0.4},
        ),
        total_steps=STEPS,
        loss=Loss(objective=sft_loss),
    )
    train_sft(
        learner,
        traces(ChatFormat(tokenizer), sub_agent, episodes=EPISODES),
        steps=STEPS,
        batch_size=16,
        micro_batch_tokens=4096,
        seed=0,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def workers() -> SubAgentSection:
    """Return the sub-agent of the sweep."""
    sweep = tomllib.loads(Path(__file__).with_name("workers.toml").read_text())
    return SubAgentSection(**sweep["variants"]["matpo"]["rollout"]["sub_agent"])


def traces(chat: ChatFormat, sub_agent: SubAgentSection, *, episodes: int) -> list[TokenSequence]:
    """Return the conversations of clumsy readers. One in three episodes has workers."""
    generator = np.random.default_rng(0)
    found: list[TokenSequence] = []
    for number in range(episodes):
        delegates = None if number % 3 else sub_agent
        for opening, tools, moves in _conversations(delegates, generator, mistakes=MISTAKES):
            found.append(_tokens(chat, opening, tools, moves, number=number))
    return found


def right_words(model: PreTrainedModel, chat: ChatFormat, sub_agent: SubAgentSection | None) -> float:
    """Return the probability that a policy takes the right word from its first page.

    It is the mean of the exact probabilities over held-out episodes. With a sub-agent the reader is a worker,
    otherwise the agent of the episode.
    """
    generator = np.random.default_rng(1)
    found: list[float] = []
    model.eval()
    while len(found) < PAGES:
        for opening, tools, moves in _conversations(sub_agent, generator, mistakes=0.0):
            if "read" not in (tool.function.name for tool in tools):
                continue
            said = moves[1][0]
            ids = _tokens(chat, opening, tools, moves[:2], number=0).token_ids
            size = len(chat.tokenizer.encode(said.content, add_special_tokens=False))
            begin = len(ids) - len(chat.completion(said))
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            word = range(begin, begin + size)
            found.append(sum(float(logits[i - 1, ids[i]]) for i in word))
    return fmean(map(math.exp, found))


def main() -> None:
    """Print each variant's probability of the right word, before training and after it with every seed."""
    torch.set_num_threads(1)
    start, sub_agent = Path("runs/paper/rooms"), workers()
    sweep = load_sweep(Path(__file__).with_name("workers.toml"), cores=1)
    chat = ChatFormat(AutoTokenizer.from_pretrained(start))
    models = {"before": [start]}
    for run in sweep.runs:
        last = max(run.folder.glob("checkpoints/step_*/model"))
        models.setdefault(run.variant, []).append(last)
    for name, folders in models.items():
        loaded = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
        for form, reader in (("alone", None), ("as a worker", sub_agent)):
            shares = [right_words(one, chat, reader) for one in loaded]
            print(
                f"{name}, {form}:",
                *(f"{share:.2f}" for share in shares),
                share_interval(shares, episodes=PAGES),
            )


def _conversations(
    sub_agent: SubAgentSection | None, generator: np.random.Generator, *, mistakes: float
) -> Iterator[tuple[Sequence[Message], Sequence[ToolSpec], Moves]]:
    """Play an episode and yield the conversation of each agent."""
    rooms = Rooms()
    opening = [Message(role="user", content=rooms.reset(None, generator))]
    tools = Rooms.tool_specs()
    moves: list[tuple[Message, str]] = []
    words: list[str] = []
    for room in rooms.rooms:
        page, read = rooms.pages[room], ToolCall.of("read", room=room)
        word = (rooms.wrong if generator.random() < mistakes else rooms.right)[room]
        if sub_agent is None:
            moves.append((Message.assistant(" ".join(words), read), page))
        else:
            call = ToolCall.of(sub_agent.name, task=room)
            moves.append((Message.assistant(" ".join(words), call), word))
            reading = [(Message.assistant("", read), page), (Message.assistant(word), "")]
            yield worker_opening(sub_agent, room), worker_tools(sub_agent, tools), reading
        words.append(word)
    code = " ".join(words)
    moves.append((Message.assistant(code, ToolCall.of("submit", code=code)), ""))
    yield opening, tools if sub_agent is None else planner_tools(sub_agent, tools), moves


def _tokens(
    chat: ChatFormat, opening: Sequence[Message], tools: Sequence[ToolSpec], moves: Moves, *, number: int
) -> TokenSequence:
    """Return a conversation as tokens sampled by a policy."""
    new_ids, ids, mask = chat.opening(opening, tools), [], []
    for turn, (said, heard) in enumerate(moves, start=1):
        completion = chat.completion(said)
        ids += [*new_ids, *completion]
        mask += [0.0] * len(new_ids) + [1.0] * len(completion)
        message = chat.parse(completion, turn=turn, tools=tools).message
        reply = [
            Message(role="tool", content=heard, tool_call_id=call.id) for call in message.tool_calls or ()
        ]
        new_ids = chat.reply(reply, after=message, tools=tools, stop=completion[-1]) if reply else []
    size = len(ids)
    return TokenSequence(
        token_ids=np.array(ids, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.full(size, -1, dtype=np.int64),
        advantages=np.array(mask, dtype=np.float32),
        task="rooms",
        group_id=number,
    )


if __name__ == "__main__":
    main()
