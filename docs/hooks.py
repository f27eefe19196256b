"""Build hooks: generated tables of settings, and a warning for each public name without a docstring.

Warnings end a strict build.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer

from agentrl_env.__main__ import app
from agentrl_train.config.reference import reference

log = logging.getLogger("mkdocs.hooks.docs")
ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"<!-- generated: (\w+) ?(\w*) -->")
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the generated parts of a page, and check the docstrings of what it refers to."""
    for name in DIRECTIVE.findall(markdown):
        for missing in without_docstring(name):
            log.warning("%s: %s has no docstring", page.file.src_uri, missing)
    return MARKER.sub(lambda match: GENERATED[match[1]](match[2]), markdown)


def without_docstring(name: str) -> Iterator[str]:
    """Yield the public names at or below ``name`` that have no docstring.

    Fields of a model are exempt: their section of the class's docstring, or their type, describes them.
    """
    root, _, inner = name.partition(".")
    try:
        found = _package(root)[inner] if inner else _package(root)
    except KeyError:
        return  # mkdocstrings reports it
    yield from _undocumented(found)


@cache
def _package(name: str) -> Any:
    import griffe  # not needed by the tests of the generated parts

    return griffe.GriffeLoader(search_paths=[str(ROOT)]).load(name)


def _undocumented(found: Any) -> Iterator[str]:
    if not found.has_docstring:
        yield found.path
    for name, member in found.members.items():
        if name.startswith("_") or member.is_alias:
            continue
        if member.is_class or member.is_function or "property" in member.labels:
            yield from _undocumented(member)


def command_options(name: str) -> str:
    """Return the options of a command of ``agentrl-env`` as a table."""
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in command.params:
        if option.param_type_name != "option" or option.name == "help":
            continue
        value = f" {option.metavar}" if option.metavar else ""
        spelled = f"`{', '.join([*option.opts, *option.secondary_opts])}{value}`"
        default = option.show_default if isinstance(option.show_default, str) else option.default
        shown = "" if default in (None, False, []) or option.required else f"`{default}`"
        env = f" Environment variable: `{option.envvar}`." if option.envvar else ""
        rows.append(f"| {_cell(spelled)} | {shown} | {_cell(option.help or '')}{env} |")
    return "\n".join(rows)


def caller_limits(_: str) -> str:
    """Return the limits of ``--caller-limit`` as a table."""
    from agentrl_env.server.limits import Limits

    meanings = dict(re.findall(r"^ {4}(\w+): ((?:.|\n {5,})+)", cleandoc(Limits.__doc__ or ""), re.MULTILINE))
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for name, field in Limits.model_fields.items():
        rows.append(f"| `{name}` | `{field.default}` | {_cell(meanings.get(name, ''))} |")
    return "\n".join(rows)


def run_settings(_: str) -> str:
    """Return every setting of a run, one table for each section."""
    rows: list[str] = []
    for line in reference().splitlines():
        setting, meaning = re.match(r"(?:# )?(.*?) *(?:# (.*))?$", line).groups()  # type: ignore[union-attr]
        if setting.startswith("["):
            rows += ["", f"### {setting.strip('[]')}", "", meaning or "", ""]
            rows += ["| setting | default | meaning |", "|---|---|---|"]
        elif setting:
            key, _, value = setting.partition(" =")
            default = f"`{value.strip()}`" if value.strip() else ""
            rows.append(f"| `{key}` | {default} | {_cell(meaning or '')} |")
    return "\n".join(rows)


def preset(name: str) -> str:
    """Return the file of a preset."""
    from agentrl_train.config.loading import PRESETS

    return f"```toml\n{(PRESETS / f'{name}.toml').read_text()}```"


def evidence(name: str) -> str:
    """Return the figure and the table of a sweep of ``make paper``."""
    found = json.loads((ROOT / "docs/evidence" / f"{name}.json").read_text())
    rows = [
        f"![{name}](evidence/{name}.svg)\n",
        f"| variant | success | greedy | area | difference to `{found['baseline']}` | episodes | processor |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found["variants"]:
        final, change = one["final"], one["difference"]["success"]
        above = f"<br>above in {change['above']} of {change['n']}"
        paired = "" if one["name"] == found["baseline"] else _shares(change, sign="+") + above
        shares = " | ".join(_shares(final[key]) for key in ("success", "greedy", "area"))
        rows.append(
            f"| `{one['name']}` | {shares} | {paired} | {one['samples']:,.0f} | {one['processor_s']:.0f} s |"
        )
    tasks = list(dict.fromkeys(task for one in found["variants"] for task in one["tasks"]))
    if len(tasks) > 1:
        rows += ["", f"| success by task | {' | '.join(tasks)} |", f"|---|{'---|' * len(tasks)}"]
        for one in found["variants"]:
            cells = [_shares(one["tasks"].get(task, {}).get("success")) for task in tasks]
            rows.append(f"| `{one['name']}` | {' | '.join(cells)} |")
    rows += ["", f"Means over the seeds {found['seeds']}. To repeat it: `make paper ARGS={name}`"]
    return "\n".join(rows)


def _shares(found: dict[str, Any] | None, *, sign: str = "") -> str:
    """Return a mean in percent, or in points with a sign, and its interval."""
    if found is None:
        return ""
    mean, low, high = (100 * found[key] for key in ("mean", "low", "high"))
    return f"{mean:{sign}.1f}&nbsp;[{low:{sign}.0f},&nbsp;{high:{sign}.0f}]"


def fleet_keys(_: str) -> str:
    """Return the keys of the file of ``agentrl-env up`` as a table."""
    from agentrl_env.fleet.config import SECTIONS

    rows = ["| key | default |", "|---|---|"]
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            shown = "" if field.is_required() or default is None else f"`{default}`"
            if key != "limits":
                rows.append(f"| `{section}.{key}` | {'required' if field.is_required() else shown} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


GENERATED = {
    "command": command_options,
    "limits": caller_limits,
    "settings": run_settings,
    "preset": preset,
    "evidence": evidence,
    "fleet": fleet_keys,
}
