"""The sampled tokens of an episode as HTML: text, with log-probability, advantage and version of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl_train.report.curves import number

MOST_TOKENS = 4000
"""Maximum number of shown tokens of a turn."""
PROBABILITIES = (0.99, 0.9, 0.7, 0.5, 0.3, 0.1)
"""Lower bounds of the shades, from the palest to the last but one."""
SHADES = 4
"""Number of shades of advantages on each side of 0, and of versions."""


class Vocabulary:
    """Text of token ids, from the tokenizer of the run's checkpoints. Without one, the ids themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._pieces: dict[int, str] = {}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token. A character of several tokens belongs to the last of them."""
        tokenizer = self._load_once()
        if tokenizer is None:
            return [f"⟨{one}⟩" for one in token_ids]
        pieces: list[str] = []
        open_ids: list[int] = []
        for one in token_ids:
            if one not in self._pieces:
                self._pieces[one] = _piece(tokenizer, one)
            piece = self._pieces[one]
            if "\ufffd" not in piece:
                open_ids = []
            else:
                open_ids.append(one)
                piece = tokenizer.decode(open_ids, skip_special_tokens=False)
                if "\ufffd" in piece and len(open_ids) < 4:
                    piece = ""
                else:
                    open_ids = []
            pieces.append(piece)
        return pieces

    def _load_once(self) -> Tokenizer | None:
        if self._tokenizer is None:
            places = [*sorted((self._folder / "checkpoints").glob("step_*/model"), reverse=True)]
            for place in (*places, self._folder / "best"):
                path = place / "tokenizer.json"
                if path.exists():
                    self._tokenizer = _load(path)
                    break
        return self._tokenizer


@lru_cache(maxsize=4)
def _load(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises Exception itself
        return None


def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    # A decoder of SentencePiece drops the space at the start of a text.
    if (tokenizer.id_to_token(token_id) or "").startswith("▁") and not text.startswith(" "):
        text = f" {text}"
    return text


def token_views(record: Mapping[str, Any] | None, vocabulary: Vocabulary) -> dict[int, str]:
    """Return the tokens of each turn as HTML, by the number of the turn.

    The attribute ``data-t`` has the log-probability, advantage, version and id of a token. The classes have
    the shades of its probability (``p``), its advantage (``a``, ``b`` below 0) and its version (``v``).
    """
    turns = [one if isinstance(one, Mapping) else {} for one in (record or {}).get("turns") or ()]
    largest = max((abs(value) for turn in turns for value in _numbers(turn, "advantages")), default=0.0)
    versions = sorted({round(value) for turn in turns for value in _numbers(turn, "versions")}, reverse=True)
    views = {}
    for index, turn in enumerate(turns):
        if ids := [round(value) for value in _numbers(turn, "token_ids")]:
            tokens = "".join(_tokens(turn, vocabulary.pieces(ids[:MOST_TOKENS]), largest, versions))
            views[index] = (
                f'<details class="tokens" open><summary>{escape(_summary(turn, ids))}</summary>'
                f'<div class="stream">{tokens}{_rest(len(ids))}</div></details>'
            )
    return views


def _tokens(
    turn: Mapping[str, Any], pieces: Sequence[str], largest: float, versions: Sequence[int]
) -> Iterator[str]:
    ids, logprobs, advantages = (_numbers(turn, name) for name in ("token_ids", "logprobs", "advantages"))
    of_version = _numbers(turn, "versions")
    for i, piece in enumerate(pieces):
        logprob, advantage, version = (_at(values, i) for values in (logprobs, advantages, of_version))
        shades = []
        if logprob is not None:
            probability = math.exp(min(0.0, logprob))
            shades.append(f"p{sum(probability < bound for bound in PROBABILITIES)}")
        if advantage:
            shades.append(f"{'a' if advantage > 0 else 'b'}{math.ceil(SHADES * abs(advantage) / largest)}")
        if version is not None:
            shades.append(f"v{min(versions.index(round(version)), SHADES - 1)}")
        facts = json.dumps([logprob, advantage, version, ids[i]])
        yield f'<span class="{" ".join(shades)}" data-t="{escape(facts)}">{escape(piece)}</span>'


def _rest(count: int) -> str:
    return f'<span class="cut"> … {count - MOST_TOKENS:,} more tokens</span>' if count > MOST_TOKENS else ""


def _summary(turn: Mapping[str, Any], ids: Sequence[int]) -> str:
    facts = [f"{len(ids)} sampled token{'' if len(ids) == 1 else 's'}"]
    if logprobs := _numbers(turn, "logprobs"):
        facts.append(f"mean log-probability {sum(logprobs) / len(logprobs):.3f}")
    if advantages := _numbers(turn, "advantages"):
        low, high = min(advantages), max(advantages)
        facts.append(
            f"advantage {_format_signed(low)}" + (f" to {_format_signed(high)}" if low < high else "")
        )
    return " · ".join(facts)


def _format_signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def _numbers(turn: Mapping[str, Any], name: str) -> list[float]:
    given = turn.get(name)
    found = [number(one) for one in given] if isinstance(given, list) else []
    return [0.0 if one is None else one for one in found]


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None
