"""Create the quickstart's starter policy: a small model trained on episodes of noisy experts.

    python examples/quickstart/starter.py --output examples/quickstart/starter

Nothing is downloaded. Noisy experts play the level-1 tasks. A tokenizer is trained on their messages, and a
random Qwen3 model is trained to imitate them. It becomes as good as the experts and adopts their wrong habit
of where to look first. Reinforcement learning then improves it. This takes about five minutes on one core.

With ``--tasks dbbench --width 192``, it imitates the expert of another task of ``environments/``. With
``--noise 0.4``, it also imitates mistakes if the task's expert can make them. ``--tasks FOLDER`` imitates the
expert of your own task. ``--induction`` is for tasks with names of several tokens or with long episodes: the
model can copy such names from the start. ``examples/agentbench`` uses such policies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl_env import EnvClient, Environment
from agentrl_env.hosting.loader import load_target
from agentrl_train.chat import ChatFormat
from agentrl_train.config import TrainSection
from agentrl_train.learner import Learner
from agentrl_train.loss import Loss, sft_loss
from agentrl_train.sft import expert_sequences, train_sft
from agentrl_train.types import TaskSource

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "environments"
EXPERT_NOISE = {"household": 0.55, "shop": 0.45, "sql": 0.35}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def clumsy(name: str, noise: float = 0.0) -> type[Environment]:
    """Return a task, with a noisy expert if the task supports it.

    The experts of starter tasks look for things by a wrong habit.

    Args:
        name: folder of ``environments``, or another target: a folder, file.py:Class or module:Class.
        noise: ``expert_noise`` of tasks that have this attribute and are not in ``EXPERT_NOISE``.
    """
    folder = ENVIRONMENTS / name
    task = load_target(str(folder) if folder.exists() else name)
    noise = EXPERT_NOISE.get(name, noise)
    if not noise or not hasattr(task, "expert_noise"):
        return task
    return type(task.__name__, (task,), {"name": task.name, "expert_noise": noise})


def new_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which a word is one token, in prose as in JSON.

    With the usual pattern, " fridge" and "fridge" are two tokens. Here spaces are separate from words, so a
    word copied from a sentence into a call is the same token. Without ``texts`` there are no merges.
    """
    words = Regex(r" ?[A-Z]{2,} ?|\w+|[^\w]+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=5,
        special_tokens=[*CONTROL, *MARKUP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=(HERE / "chat_template.jinja").read_text(),
    )


def new_model(
    tokenizer: PreTrainedTokenizerFast, *, width: int, seed: int, induction: bool = False
) -> Qwen3ForCausalLM:
    """Return a random Qwen3 with half a million parameters for a width of 128, or a million for 192.

    Three changes to the defaults let it learn to copy words within minutes: large initial weights, a small
    rotary base, and attention that initially finds similar tokens and copies them (arXiv 2305.09828). With
    ``induction``, it has the usual initial weights, a large rotary base and ``set_induction_heads`` instead.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6 if induction else 100.0},
        initializer_range=0.02 if induction else 0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            query, key = attention.q_proj.weight, attention.k_proj.weight
            value, out = attention.v_proj.weight, attention.o_proj.weight
            key.copy_(0.8 * query + 0.6 * key)
            out.copy_(0.8 * value.T + 0.6 * out)
        if induction:
            set_induction_heads(model)
    return model


def set_induction_heads(model: Qwen3ForCausalLM) -> None:
    """Turn all but two heads of the first two layers into induction heads.

    A head of the first layer attends to the previous token and writes it to the residual stream. A head of
    the second layer finds positions after an earlier occurrence of the current token, and copies the token at
    these positions, so a sequence that occurred before is continued. In training, such heads form late
    (arXiv 2209.11895).
    """
    config, (first, second) = model.config, (layer.self_attn for layer in model.model.layers[:2])
    size, half = config.head_dim, config.head_dim // 2
    speeds = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # radians a token
    # Fast rotary pairs distinguish neighbouring positions. Slow pairs compare tokens at any distance.
    fast, slow = torch.arange(3), torch.tensor([*range(6, half), *range(half + 6, size)])
    token, before, copied = (torch.linalg.qr(torch.randn(2 * [config.hidden_size]))[0] for _ in range(3))
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_(0, 0.1)
        embedding[:, 0] = 0.4  # the same for all tokens, so that a query can depend only on the position
        token[:, 0] = before[0] = copied[:, 0] = 0
        for attention, sharpness in (first, 2.0), (second, 1.5):
            attention.q_norm.weight.fill_(sharpness)
            attention.k_norm.weight.fill_(sharpness)
        for start in range(0, size * (config.num_attention_heads - 2), size):
            head = slice(start, start + size)
            for projection in (first.q_proj, first.k_proj, second.q_proj, second.k_proj):
                projection.weight[head] *= 0.1
            first.q_proj.weight[start + fast, 0] = 1
            first.k_proj.weight[start + fast, 0] = speeds[fast].cos()
            first.k_proj.weight[start + half + fast, 0] = speeds[fast].sin()
            first.v_proj.weight[head] = token[head]
            first.o_proj.weight[:, head] = 0.2 * before[:, head]
            second.q_proj.weight[start + slow] = token[head][: len(slow)]
            second.k_proj.weight[start + slow] = before[:, head].T[: len(slow)]
            second.v_proj.weight[head] = copied[head]
            second.o_proj.weight[:, head] = 3 * copied[head].T


async def make(arguments: argparse.Namespace) -> None:
    """Play episodes, train the tokenizer and the model, and save both."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    tasks = [clumsy(name, arguments.noise) for name in arguments.tasks]
    clients = {task.name: EnvClient.local(task, max_sessions=arguments.traces) for task in tasks}
    known = {name: (await client.tasks())[name].splits["train"] for name, client in clients.items()}
    sources = {name: TaskSource(task=name, num_samples=split.num_samples) for name, split in known.items()}
    letters = ChatFormat(new_tokenizer([], vocab_size=0))
    few = arguments.traces // 10
    print("the default options take about five minutes", flush=True)
    print(f"playing {few} episodes of each expert for the tokenizer", flush=True)
    heard, success, _ = await expert_sequences(clients, letters, sources=sources, count=few)
    print("experts' success", {task: round(share, 2) for task, share in success.items()}, flush=True)
    texts = [letters.tokenizer.decode(sequence.token_ids) for sequence in heard]
    chat = ChatFormat(tokenizer := new_tokenizer(texts, vocab_size=1024))
    print(f"playing {arguments.traces} episodes of each expert for the model", flush=True)
    sequences, *_ = await expert_sequences(clients, chat, sources=sources, count=arguments.traces)
    model = new_model(tokenizer, width=arguments.width, seed=arguments.seed, induction=arguments.induction)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(tokenizer)} tokens, {len(sequences)} episodes", flush=True)
    train_sft(
        Learner(
            model,
            TrainSection(
                learning_rate=3e-3,
                betas=(0.9, 0.98),
                weight_decay=0.01,
                warmup_steps=20,
                decay={"to": 0.05, "over": 0.4},
            ),
            total_steps=arguments.steps,
            loss=Loss(objective=sft_loss),
        ),
        sequences,
        steps=arguments.steps,
        batch_size=8,
        micro_batch_tokens=4096,
        seed=arguments.seed,
        report=_report,
    )
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


def _report(step: int, metrics: dict[str, float]) -> None:
    if step % 100 == 0:
        print(step, {name: round(value, 3) for name, value in metrics.items()}, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and create the starter policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "starter")
    parser.add_argument("--tasks", nargs="+", default=list(EXPERT_NOISE), help="of environments/, or folders")
    parser.add_argument("--noise", type=float, default=0.0, help="expert_noise of the other tasks")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--induction", action="store_true", help="start with heads that copy several tokens")
    parser.add_argument("--traces", type=int, default=2000, help="expert episodes per task")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    asyncio.run(make(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
