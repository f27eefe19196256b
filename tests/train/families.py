"""Model families for the table of templates: control tokens, stop tokens and call syntax.

``FAMILIES`` has one row per template. ``make_tokenizer`` builds the tokenizer without a download. The
syntaxes are written out here, independently of the parsers and templates under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
Call = tuple[str, dict[str, Any]]
Syntax = Callable[[Sequence[Call]], str]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """Return a value as in XML syntaxes: text unchanged, other values as JSON."""
    return value if isinstance(value, str) else dumped(value)


def hermes(calls: Sequence[Call]) -> str:
    bodies = (dumped({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen_xml(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        inner = "".join(f"<parameter={key}>\n{plain(v)}\n</parameter>\n" for key, v in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


def llama_json(calls: Sequence[Call]) -> str:
    return "; ".join(dumped({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def mistral_call_id(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4{number}[ARGS]{dumped(arguments)}"
        for number, (name, arguments) in enumerate(calls)
    )


def python_calls(calls: Sequence[Call], separator: str) -> str:
    return separator.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )


def listed_python(calls: Sequence[Call]) -> str:
    return f"[{python_calls(calls, ', ')}]"


def unescaped(calls: Sequence[Call], separator: str) -> str:
    """Return Python calls as in some templates, without escaping quotes or line breaks in strings."""
    texts = []
    for name, arguments in calls:
        values = {k: f"'{v}'" if isinstance(v, str) else dumped(v) for k, v in arguments.items()}
        texts.append(f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})")
    return separator.join(texts)


def lfm(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>[{python_calls(calls, ', ')}]<|tool_call_end|>"


def olmo(calls: Sequence[Call]) -> str:
    return "<function_calls>\n" + python_calls(calls, "\n") + "\n</function_calls>"


def minicpm(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        values = {key: plain(value) for key, value in arguments.items()}
        inner = "".join(
            f'<param name="{k}">{f"<![CDATA[{v}]]>" if set("<&") & set(v) else v}</param>'
            for k, v in values.items()
        )
        texts.append(f'<function name="{name}">{inner}</function>')
    return "\n".join(texts)


def deepseek_3_1(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def glm(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        inner = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        texts.append(f"\n<tool_call>{name}\n{inner}</tool_call>")
    return "".join(texts)


def minimax(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        inner = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in arguments.items())
        texts.append(f'<invoke name="{name}">\n{inner}</invoke>\n')
    return f"\n<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def apertus(calls: Sequence[Call]) -> str:
    return "<|tools_prefix|>" + dumped([{name: arguments} for name, arguments in calls])


def kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return dumped(value)


def gemma_4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


def harmony(calls: Sequence[Call]) -> str:
    [(name, arguments)] = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}"


def harmony_recipient_first(calls: Sequence[Call]) -> str:
    [(name, arguments)] = calls
    return f" to=functions.{name}<|channel|>commentary json<|message|>{dumped(arguments)}"


def command(calls: Sequence[Call]) -> str:
    bodies = [
        {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>" + json.dumps(bodies, ensure_ascii=False, indent=4) + "<|END_ACTION|>"


def nemotron(calls: Sequence[Call]) -> str:
    bodies = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"<TOOLCALL>{dumped(bodies)}</TOOLCALL>"


def granite_list(calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


THINK = ("<think>\n", "\n</think>\n\n")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"),
    *("[TOOL_CONTENT]", "[THINK]", "[/THINK]"),
)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
DEEPSEEK_TAGS = (
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
)
LLAMA_4 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    *("<|python_start|>", "<|python_end|>"),
)
GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TAGS = (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
LFM = (
    *("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>"),
    *("<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>"),
    "<|tool_response_end|>",
)
GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
GEMMA_4 = (
    *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'),
)
KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
APERTUS = (
    *("<s>", "</s>", "<|system_start|>", "<|system_end|>", "<|developer_start|>", "<|developer_end|>"),
    *("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>"),
    *("<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
)
HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
    *("<|end|>", "<|message|>", "<|call|>"),
)
PHI = ("<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
PHI_4 = (*PHI[1:], "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
COMMAND = (
    *("<BOS_TOKEN>", "<PAD>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", "<|START_RESPONSE|>"),
    "<|END_RESPONSE|>",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table.

    Attributes:
        template: file in ``templates``, without the suffix.
        syntax: example calls as written by the family's models.
        special: special tokens of the tokenizer.
        added: additional tokens that are not special.
        eos, bos: tokens of the tokenizer's configuration.
        eos_ids: stop tokens of the generation configuration, as text.
        end: the token that ends a turn with calls.
        thought: tags that open and close a thought. ``opened`` is True if the generation prompt contains the
            opening tag.
        several: True if the models call several tools in a turn.
        rstrip: True if special tokens strip the following blanks.
        settings: settings of the ``[model]`` table for playing.
    """

    template: str
    syntax: Syntax
    special: Sequence[str]
    added: Sequence[str] = ()
    eos: str
    bos: str | None = None
    eos_ids: Sequence[str] = ()
    end: str
    thought: tuple[str, str] | None = None
    opened: bool = False
    several: bool = True
    rstrip: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def qwen(template: str, syntax: Syntax = hermes, **changes: Any) -> Family:
    known = {"eos": "<|im_end|>", "eos_ids": ("<|im_end|>", "<|endoftext|>"), "end": "<|im_end|>"}
    return Family(
        **{"template": template, "syntax": syntax, "special": CHATML, "added": TAGS, **known, **changes}
    )


def llama(template: str, **changes: Any) -> Family:
    known = {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>", "end": "<|eot_id|>", "several": False}
    stops = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return Family(
        **{
            "template": template,
            "syntax": llama_json,
            "special": LLAMA,
            "eos_ids": stops,
            **known,
            **changes,
        }
    )


def mistral(template: str, syntax: Syntax, **changes: Any) -> Family:
    known = {"eos": "</s>", "bos": "<s>", "end": "</s>"}
    return Family(**{"template": template, "syntax": syntax, "special": MISTRAL, **known, **changes})


def deepseek(template: str, syntax: Syntax = hermes, **changes: Any) -> Family:
    known = {"special": DEEPSEEK, "added": DEEPSEEK_TAGS, "bos": DEEPSEEK[0], "eos": DEEPSEEK[1]}
    return Family(**{"template": template, "syntax": syntax, "end": DEEPSEEK[1], **known, **changes})


def lfm_2(template: str, **changes: Any) -> Family:
    known = {"special": LFM, "bos": "<|startoftext|>", "eos": "<|im_end|>", "end": "<|im_end|>"}
    return Family(**{"template": template, "syntax": lfm, **known, **changes})


def glm_4(template: str) -> Family:
    return Family(
        template=template,
        syntax=glm,
        special=GLM,
        added=GLM_TAGS,
        eos="<|endoftext|>",
        eos_ids=("<|endoftext|>", "<|user|>", "<|observation|>"),
        end="<|observation|>",
        thought=("\n<think>", "</think>"),
    )


def granite(template: str, syntax: Syntax) -> Family:
    stop = "<|end_of_text|>"
    return Family(
        template=template, syntax=syntax, special=GRANITE, added=TAGS[:4], eos=stop, bos=stop, end=stop
    )


def gemma(template: str) -> Family:
    return Family(
        template=template,
        syntax=hermes,
        special=GEMMA,
        eos="<eos>",
        bos="<bos>",
        eos_ids=("<eos>", "<end_of_turn>"),
        end="<end_of_turn>",
    )


def kimi_k2(template: str) -> Family:
    stop = "<|im_end|>"
    return Family(
        template=template, syntax=kimi, special=KIMI, eos="[EOS]", bos="[BOS]", eos_ids=(stop,), end=stop
    )


XML_TAGS = (*TAGS, "<function", "</function>", "<param", "</param>")
FAMILIES: dict[str, Family] = {
    "Qwen2.5": qwen("qwen_2_5"),
    "Qwen2.5 base": qwen("qwen_2_5", eos="<|endoftext|>", eos_ids=("<|endoftext|>",)),
    "Qwen3": qwen("qwen_3", thought=THINK),
    "Qwen3 without thinking": qwen("qwen_3", settings={"template_kwargs": {"enable_thinking": False}}),
    "Qwen3-2507": qwen("qwen_3_2507"),
    "Qwen3-Coder": qwen("qwen_3_coder", qwen_xml),
    "Qwen3.5": qwen("qwen_3_5", qwen_xml, thought=THINK, opened=True),
    "Qwen3.5 small": qwen("qwen_3_5_small", qwen_xml),
    "Qwen3.6": qwen("qwen_3_6", qwen_xml, thought=THINK, opened=True),
    "Nemotron-3-Nano": qwen(
        "nemotron_3_nano",
        qwen_xml,
        special=("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        eos_ids=("</s>", "<|im_end|>"),
        thought=("<think>\n", "\n</think>\n"),
        opened=True,
    ),
    "Nemotron-Nano-2": Family(
        template="nemotron_nano_2",
        syntax=nemotron,
        special=("<unk>", "<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        added=("<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>"),
        bos="<s>",
        eos="<SPECIAL_12>",
        end="<SPECIAL_12>",
        thought=("<think>\n\n", "\n</think>\n\n"),
        opened=True,
    ),
    "Granite-4.0": granite("granite_4", hermes),
    "Granite-3.3": granite("granite_3_3", granite_list),
    "Llama-3.0": llama("llama_3_0", syntax=hermes),
    "Llama-3.1": llama("llama_3_1"),
    "Llama-3.2": llama("llama_3_2"),
    "Llama-3.3": llama("llama_3_1"),
    "Llama-4": llama(
        "llama_4",
        special=LLAMA_4,
        eos="<|eot|>",
        eos_ids=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        end="<|eot|>",
        several=True,
    ),
    "Ministral-3": mistral("ministral_3", mistral_args, thought=("[THINK]", "[/THINK]")),
    "Devstral": mistral("devstral", mistral_args),
    "Mistral-Nemo": mistral("mistral_nemo", mistral_list),
    "Mistral-Small-3.2": mistral("mistral_small_3_2", mistral_call_id),
    "LFM2": lfm_2("lfm_2"),
    "LFM2 v2": lfm_2("lfm_2_5"),
    "LFM2.5": lfm_2("lfm_2_5", thought=("<think>", "</think>")),
    "OLMo-3": qwen(
        "olmo_3",
        olmo,
        added=("<functions>", "</functions>", "<function_calls>", "</function_calls>"),
        bos="<|endoftext|>",
    ),
    "MiniCPM5": qwen(
        "minicpm_5",
        minicpm,
        special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        added=XML_TAGS,
        eos_ids=("</s>", "<|im_end|>"),
        thought=THINK,
    ),
    "DeepSeek-V3": deepseek("deepseek_3", thought=THINK, opened=True),
    "DeepSeek-V3.1": deepseek("deepseek_3_1"),
    "R1-Distill-Qwen": deepseek("r1_distill_qwen"),
    "R1-Distill-Llama": deepseek("r1_distill_llama", thought=THINK, opened=True),
    "SmolLM2": qwen("smollm_2", added=(), eos_ids=()),
    "SmolLM3": qwen("smollm_3", thought=THINK, eos_ids=()),
    "Hermes-3": qwen(
        "hermes_3", special=(*LLAMA, "<|im_start|>", "<|im_end|>"), bos="<|begin_of_text|>", eos_ids=()
    ),
    "gpt-oss": Family(
        template="gpt_oss",
        syntax=harmony,
        special=HARMONY,
        eos="<|return|>",
        bos="<|startoftext|>",
        eos_ids=("<|return|>", "<|endoftext|>", "<|call|>"),
        end="<|call|>",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        several=False,
    ),
    "GLM-4.5": glm_4("glm_4_5"),
    "GLM-4.6": glm_4("glm_4_6"),
    "MiniMax-M2": Family(
        template="minimax_m2",
        syntax=minimax,
        special=("]~!b[", "]~b]", "[e~["),
        added=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        eos="[e~[",
        bos="]~!b[",
        end="[e~[",
        thought=THINK,
        opened=True,
    ),
    "Apertus": Family(
        template="apertus",
        syntax=apertus,
        special=APERTUS,
        eos="<|assistant_end|>",
        bos="<s>",
        eos_ids=("<|assistant_end|>", "<|tools_suffix|>"),
        end="<|tools_suffix|>",
        thought=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "Kimi-K2": kimi_k2("kimi_k2"),
    "Kimi-K2-0905": kimi_k2("kimi_k2_0905"),
    "Gemma-4": Family(
        template="gemma_4",
        syntax=gemma_4,
        special=GEMMA_4,
        eos="<eos>",
        bos="<bos>",
        eos_ids=("<eos>", "<turn|>", "<|tool_response>"),
        end="<|tool_response>",
    ),
    "Gemma-4 thinking": Family(
        template="gemma_4",
        syntax=gemma_4,
        special=GEMMA_4,
        eos="<eos>",
        bos="<bos>",
        eos_ids=("<eos>", "<turn|>", "<|tool_response>"),
        end="<|tool_response>",
        thought=("<|channel>thought\n", "\n<channel|>"),
        settings={"template_kwargs": {"enable_thinking": True}},
    ),
    "Phi-3.5": Family(
        template="phi_3_5",
        syntax=hermes,
        special=PHI,
        eos="<|endoftext|>",
        bos="<s>",
        eos_ids=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        end="<|end|>",
        rstrip=True,
    ),
    "Phi-4-mini": Family(
        template="phi_4_mini",
        syntax=hermes,
        special=PHI_4,
        eos="<|endoftext|>",
        bos="<|endoftext|>",
        eos_ids=("<|end|>", "<|endoftext|>"),
        end="<|end|>",
        rstrip=True,
    ),
    "Gemma-2": gemma("gemma_2"),
    "Gemma-3": gemma("gemma_3"),
    "Command-R7B": Family(
        template="command_r7b",
        syntax=command,
        special=COMMAND,
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "Zephyr": Family(
        template="zephyr", syntax=hermes, special=("<unk>", "<s>", "</s>"), eos="</s>", bos="<s>", end="</s>"
    ),
}


def make_tokenizer(family: Family, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a family's control tokens and template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=family.rstrip) for token in family.special]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template or (TEMPLATES / f"{family.template}.jinja").read_text(),
    )
