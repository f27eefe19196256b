"""Write the generated text of the documentation into its pages (``python -m docs.generate``).

A page has generated text between ``<!-- generated: KIND NAME -->`` and ``<!-- end -->``. The text is
committed, so that every page is readable in an editor and on a code host. ``--check`` lists stale pages and
writes nothing.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

import griffe
import typer

from agentrl_env.__main__ import app
from agentrl_train.config.reference import reference

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"(<!-- generated: (\w+) ?(\S*) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(markdown: str) -> str:
    """Return a page with its generated text updated."""
    return MARKER.sub(lambda m: f"{m[1]}\n{GENERATED[m[2]](m[3]).strip()}\n\n{m[4]}", markdown)


def pages() -> list[Path]:
    """Return the pages with generated text."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if "<!-- generated:" in page.read_text(encoding="utf-8")]


def stale_pages() -> list[Path]:
    """Return the pages with generated text that does not match the code."""
    return [page for page in pages() if fill(text := page.read_text(encoding="utf-8")) != text]


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
    """Return every setting of a run, with a table for each section."""
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
        f"| variant | area | difference to `{found['baseline']}` | p | success | greedy "
        "| episodes | processor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in found["variants"]:
        final, change = variant["final"], variant["difference"]["area"]
        paired = adjusted = ""
        if variant["name"] != found["baseline"] and change is None:
            paired = "not compared"
        elif variant["name"] != found["baseline"]:
            paired = f"{_shares(change, sign='+')}<br>larger in {change['above']} of {change['n']} seeds"
            adjusted = f"{change['p_holm']:.2g}" if change["p_holm"] >= 1e-3 else "< 0.001"
        area, success = (_shares(final[key]) for key in ("area", "success"))
        greedy = f"{100 * final['greedy']['mean']:.1f}" if final["greedy"] else ""
        cost = f"{variant['samples']:,.0f} | {variant['processor_s']:.0f} s"
        rows.append(
            f"| `{variant['name']}` | {area} | {paired} | {adjusted} | {success} | {greedy} | {cost} |"
        )
    tasks = list(dict.fromkeys(task for variant in found["variants"] for task in variant["tasks"]))
    if len(tasks) > 1:
        rows += ["", f"| success by task | {' | '.join(tasks)} |", f"|---|{'---|' * len(tasks)}"]
        for variant in found["variants"]:
            cells = [_shares(variant["tasks"].get(task, {}).get("success")) for task in tasks]
            rows.append(f"| `{variant['name']}` | {' | '.join(cells)} |")
    target = "paper-real" if name.startswith("real_") else "paper"
    rows += ["", f"Means over the seeds {found['seeds']}. To repeat it: `make {target} ARGS={name}`"]
    return "\n".join(rows)


def first_level(model: str) -> str:
    """Return the figures of a language model on the first level of the tasks as a table."""
    found = json.loads((ROOT / "docs/evidence/first_level" / f"{model}.json").read_text())
    rows = [
        "| task | success, 95 % interval | turns with valid calls | turns | errors of failed episodes |",
        "|---|---|---|---|---|",
    ]
    for task, one in found.items():
        if "skipped" in one:
            rows.append(f"| {task} | not played: {_cell(one['skipped'])} | | | |")
            continue
        low, high = (100 * bound for bound in one["interval"])
        errors = ", ".join(f"{error} ({count})" for error, count in one["errors"].items())
        rows.append(
            f"| {task} | {one['successes']} of {one['episodes']} [{low:.0f}, {high:.0f}] "
            f"| {100 * one['valid_turns']:.0f}% | {one['turns']:.1f} | {errors} |"
        )
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


def api(name: str) -> str:
    """Return the reference of a public name: its signature, its docstring and its members.

    Raises:
        ValueError: A public name has no docstring.
    """
    return "\n\n".join(_described(_found(name), level=2))


def _found(name: str) -> Any:
    """Return the module, class or function of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        file = ROOT.joinpath(*parts[:length]).with_suffix(".py")
        if file.is_file():
            module = _module(".".join(parts[:length]), file)
            return module[".".join(parts[length:])] if length < len(parts) else module
    raise ValueError(f"no module has the name {name}")


@cache
def _module(name: str, file: Path) -> Any:
    """Return one parsed module. Parsing whole packages takes ten times as long."""
    logging.getLogger("griffe").setLevel(logging.ERROR)
    *packages, last = name.split(".")
    parent, collection = None, griffe.ModulesCollection()
    for package in packages:  # empty, so that base classes within the module resolve by their paths
        member = griffe.Module(package, parent=parent, modules_collection=collection)
        (collection if parent is None else parent).set_member(package, member)
        parent = member
    module = griffe.visit(
        last,
        file,
        file.read_text(encoding="utf-8"),
        parent=parent,
        docstring_parser=griffe.Parser.google,
        docstring_options={"warn_unknown_params": False, "warnings": False},
        modules_collection=collection,
    )
    (collection if parent is None else parent).set_member(last, module)
    griffe.DataclassesExtension().on_package(pkg=module)
    return module


def _described(found: Any, level: int) -> list[str]:
    """Return the paragraphs of a module, class or function and of its public members."""
    if not found.has_docstring:
        raise ValueError(f"{found.path} has no docstring")
    of_class = found.parent is not None and found.parent.is_class
    title = found.path if found.is_module else f"{found.parent.name}.{found.name}" if of_class else found.name
    parts = [f"{'#' * level} `{title}`"]
    if not found.is_module:
        parts.append(f"```python\n{_signature(found)}\n```")
    parts += _sections(found.docstring)
    fields, members = [], []
    for name, member in found.members.items():
        if name.startswith("_") or member.is_alias or member.is_module:
            continue
        if member.is_attribute and "property" not in member.labels:
            if member.has_docstring:
                fields.append(_field(name, member))
        else:
            members += _described(member, level + 1)
    return parts + (["\n".join(fields)] if fields else []) + members


def _field(name: str, attribute: Any) -> str:
    text = f"{name}: {attribute.annotation}" if attribute.annotation else name
    if attribute.value is not None and len(str(attribute.value)) <= 40:
        text += f" = {attribute.value}"
    return f"- `{text}`: {_joined(attribute.docstring.value)}"


def _signature(found: Any) -> str:
    """Return the signature of a class or function, with one parameter per line if it is long."""
    if found.is_attribute:
        return f"{found.name}: {found.annotation}"
    bases = [str(base) for base in found.bases] if found.is_class else []
    head = f"class {found.name}" if found.is_class else f"def {found.name}"
    if "async" in found.labels:
        head = f"async {head}"
    shown = [] if found.is_class and not found.parameters else _parameters(found)
    result = f" -> {found.returns}" if found.is_function and found.returns else ""
    if found.is_class and not shown:
        return f"{head}({', '.join(bases)})" if bases else head
    line = f"{head}({', '.join(shown)}){result}"
    if len(line) <= 100:
        return line
    return f"{head}(\n" + "".join(f"    {parameter},\n" for parameter in shown) + f"){result}"


def _parameters(found: Any) -> list[str]:
    shown: list[str] = []
    keyword_only = False
    for parameter in found.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value if parameter.kind else ""
        if kind == "keyword-only" and not keyword_only:
            shown.append("*")
        keyword_only = keyword_only or kind in ("keyword-only", "variadic positional")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = f"{stars}{parameter.name}" + (f": {parameter.annotation}" if parameter.annotation else "")
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
        shown.append(text)
    return shown


def _sections(docstring: Any) -> list[str]:
    """Return the sections of a docstring in Google's style as Markdown."""
    parts: list[str] = []
    for section in docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            parts.append(re.sub(r"::$", ":", section.value, flags=re.MULTILINE))
        elif kind in ("parameters", "attributes", "other parameters"):
            rows = [f"- `{item.name}`: {_joined(item.description)}" for item in section.value]
            parts.append("\n".join([f"{kind.capitalize()}:\n", *rows]))
        elif kind == "raises":
            rows = [f"- `{item.annotation}`: {_joined(item.description)}" for item in section.value]
            parts.append("\n".join(["Raises:\n", *rows]))
        elif kind in ("returns", "yields"):
            text = " ".join(_joined(item.description) for item in section.value)
            parts.append(f"{kind.capitalize()}: {text}")
        elif kind == "admonition":
            parts.append(f"{section.title}: {_joined(section.value.contents)}")
        elif kind == "examples":
            parts += [
                value if part.value == "text" else f"```pycon\n{value}\n```" for part, value in section.value
            ]
        else:
            raise ValueError(f"{docstring.parent.path}: no rule for a section of the kind {kind}")
    return parts


def _joined(text: str) -> str:
    return " ".join(text.split())


GENERATED = {
    "api": api,
    "command": command_options,
    "limits": caller_limits,
    "settings": run_settings,
    "preset": preset,
    "evidence": evidence,
    "first_level": first_level,
    "fleet": fleet_keys,
}


def main() -> None:
    """Write the stale pages, or list them with ``--check``."""
    found = stale_pages()
    for page in found:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    if found and "--check" in sys.argv[1:]:
        raise SystemExit("generated text is out of date: run make docs-text")


if __name__ == "__main__":
    main()
