"""Write wording files for AgentBench's five tasks from a checkout of its function-calling version.

python examples/agentbench/wording.py CHECKOUT FOLDER [--split std]

The checkout is parsed and never imported. The files are yours: this repository has no text of AgentBench.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Wording = dict[str, Any]
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Mismatch(Exception):
    """The checkout lacks something that the version 578c5e9 has."""


class Module:
    """A Python file of the checkout, read as a syntax tree."""

    def __init__(self, path: Path) -> None:
        try:
            self.tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            raise Mismatch(f"cannot read {path}: {error}") from error
        self.path = path

    def constant(self, name: str) -> Any:
        """Return the value of a constant of the module."""
        for value in _assigned(self.tree.body, name):
            try:
                return ast.literal_eval(value)
            except ValueError:
                break
        raise self.lacks(f"the constant {name}")

    def function(self, name: str) -> Function:
        """Return a function, or a method as ``Class.method``."""
        found: Any = self.tree
        for part in name.split("."):
            named = (node for node in ast.walk(found) if getattr(node, "name", None) == part)
            found = next((node for node in named if isinstance(node, DEFINITIONS)), None)
            if found is None:
                raise self.lacks(f"the function {name}")
        return Function(self, found)

    def lacks(self, what: str) -> Mismatch:
        return Mismatch(f"{self.path} lacks {what}; use AgentBench at 578c5e9, or write the file by hand")


class Function:
    """A function of a module, with the texts that it builds."""

    def __init__(self, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.module, self.node = module, node

    def message(self, role: str, position: int = 0) -> ast.expr:
        """Return the content of a message that the function sends, by role and position."""
        found = [
            keyword.value
            for call in _in_order(self.node, ast.Call)
            if _name(call.func) == f"ChatCompletion{role.title()}MessageParam"
            for keyword in call.keywords
            if keyword.arg == "content"
        ]
        if position >= len(found):
            raise self.lacks(f"message {position + 1} of the role {role}")
        return found[position]

    def values(self, name: str) -> list[ast.expr]:
        """Return the values that the function assigns to a variable or adds to it, in order."""
        if found := _assigned(list(_in_order(self.node, ast.stmt)), name):
            return found
        raise self.lacks(f"the variable {name}")

    def suffix(self, name: str) -> str:
        """Return the text that follows a cut value of a variable, as in ``text = text[:9] + "..."``."""
        for value in self.values(name):
            if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Subscript):
                return self.template(value.right)
        raise self.lacks(f"a cut of {name}")

    def template(self, node: ast.expr, **fields: str) -> str:
        """Return the text of an expression as a template.

        Args:
            node: The expression.
            fields: The field for a variable, attribute or key of the function. Others become their value.
        """
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.replace("{", "{{").replace("}", "}}")
        if isinstance(node, ast.JoinedStr):
            return "".join(self.template(part, **fields) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.template(node.value, **fields)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.template(node.left, **fields) + self.template(node.right, **fields)
        name = _name(node)
        if name in fields:
            return f"{{{fields[name]}}}"
        if isinstance(node, ast.Call):
            called = self.module.function(name)
            for returned in _in_order(called.node, ast.Return):
                return called.template(returned.value, **fields)
        if isinstance(node, ast.Name):
            scope = [*_in_order(self.node, ast.stmt), *self.module.tree.body]
            if len(values := _assigned(scope, name)) == 1:
                return self.template(values[0], **fields)
        raise self.lacks(f"a text in {ast.unparse(node)!r}")

    def lacks(self, what: str) -> Mismatch:
        return self.module.lacks(f"{what} in the function {self.node.name}")


def _in_order(node: ast.AST, kind: type[Any]) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kind):
            yield child
        yield from _in_order(child, kind)


def _assigned(statements: list[Any], name: str) -> list[ast.expr]:
    found = []
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AugAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id == name:
                found.append(statement.value)
    return found


def _name(node: ast.AST | None) -> str:
    """Return the last name of an expression: ``a`` of ``x.a``, ``x["a"]``, ``a[i]`` and ``x.a()``."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Subscript):
        key = node.slice
        return (
            str(key.value)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
            else _name(node.value)
        )
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Checkout:
    """A checkout of AgentBench."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split

    def module(self, path: str) -> Module:
        return Module(self.folder / "src/server/tasks" / path)

    def parameter(self, task: str, name: str) -> Any:
        """Return a parameter of a task for the split, from its configuration."""
        path = self.folder / f"configs/tasks/{task}.yaml"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            section = content[f"{task}-{self.split}"]
            return {**content["default"]["parameters"], **section["parameters"]}[name]
        except KeyError as error:
            raise Mismatch(f"{path} lacks {error}; use AgentBench at 578c5e9") from error
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise Mismatch(f"cannot read {path}: {error}") from error


def os_interaction(checkout: Checkout) -> Wording:
    module = checkout.module("os_interaction/task.py")
    opening, turn = module.function("_inject_initial_messages"), module.function("_handle_agent_action")
    run = module.function("_execute_bash_command")
    output = run.message("tool")
    if not isinstance(output, ast.IfExp):
        raise run.lacks("one text for an output and another for none")
    return {
        "messages": [_system(opening.template(opening.message("system")))],
        "tools": checkout.parameter("os", "tools"),
        "texts": {
            "opening": opening.template(opening.message("user"), description="question"),
            "output": run.template(output.body, result_text="output"),
            "no_output": run.template(output.orelse),
            "cut": run.suffix("result_text"),
            "no_tool_call": turn.template(turn.message("user")),
        },
    }


def dbbench(checkout: Checkout) -> Wording:
    start = checkout.module("dbbench/task.py").function("start_sample")
    execute = checkout.module("dbbench/interaction.py").function("MySQLDatabase.execute")
    _, *parts = start.values("user_prompt")
    if len(parts) != 3:
        raise start.lacks("three parts of the variable user_prompt")
    fields = {"evidence": "evidence", "add_description": "notes", "description": "question"}
    evidence, notes, question = (start.template(part, **fields) for part in parts)
    return {
        "messages": [_system(start.template(start.message("system")))],
        "tools": checkout.parameter("dbbench", "tools"),
        "texts": {
            "opening": f"{{evidence}}{{notes}}{question}",
            "evidence": evidence,
            "notes": notes,
            "result": "{rows}",
            "no_rows": "{rows}",
            "changed": "{rows}",
            "cut": execute.suffix("result_str"),
            "no_tool_call": start.template(start.message("user", 1)),
        },
    }


def knowledgegraph(checkout: Checkout) -> Wording:
    start = checkout.module("knowledgegraph/task.py").function("sync_start_sample")
    const, api = checkout.module("knowledgegraph/const.py"), checkout.module("knowledgegraph/api.py")
    try:
        system = const.constant("INSTRUCTIONS").format(max_round=checkout.parameter("kg", "max_rounds"))
    except (LookupError, ValueError) as error:
        raise const.lacks("INSTRUCTIONS with the field max_round") from error
    examples = const.constant("ONE_SHOT") if checkout.parameter("kg", "one_shot") else []
    fields = {"range_info": "type", "join": "names"}

    def answer(name: str) -> str:
        function = api.function(name)
        return function.template(function.values("rtn_str")[0], **fields).replace("##", "#{number}")

    return {
        "messages": [{"role": "system", "content": system}, *examples],
        "tools": const.constant("TOOLS"),
        "texts": {
            "opening": start.template(start.message("user"), question="question", join="entities"),
            "names": answer("get_relations"),
            "variable": answer("get_neighbors"),
            "count": answer("count"),
            "no_tool_call": start.template(start.message("user", 1)),
        },
    }


def alfworld(checkout: Checkout) -> Wording:
    run = checkout.module("alfworld/task.py").function("alfworld_run")
    fields = {"ob": "observation", "observation": "observation", "actions": "actions"}
    return {
        "messages": [_system(run.template(run.message("system")))],
        "tools": checkout.parameter("alfworld", "tools"),
        "texts": {
            "opening": run.template(run.message("user"), **fields),
            "reply": run.template(run.message("tool"), **fields),
            "no_tool_call": run.template(run.message("user", 1)),
        },
    }


def webshop(checkout: Checkout) -> Wording:
    start = checkout.module("webshop/task.py").function("sync_start_sample")
    fields = {name: name for name in ("action", "observation", "available_actions")}
    nudge = next((v for v in start.values("observation") if isinstance(v, ast.Constant)), None)
    if nudge is None:
        raise start.lacks("a text for the variable observation")
    again, page = (start.template(start.message(*at), **fields) for at in (("user", 1), ("tool", 0)))
    return {
        "messages": [_system(start.template(start.message("system")))],
        "tools": checkout.parameter("webshop", "tools"),
        "texts": {
            "opening": start.template(start.message("user"), **fields),
            "page": page,
            "refused": page,
            "no_tool_call": again.replace("{observation}", start.template(nudge)),
        },
    }


def _system(template: str) -> dict[str, str]:
    return {"role": "system", "content": template.format()}


TASKS: dict[str, Callable[[Checkout], Wording]] = {
    "os_interaction": os_interaction,
    "dbbench": dbbench,
    "knowledgegraph": knowledgegraph,
    "alfworld": alfworld,
    "webshop": webshop,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write AgentBench's wording as files for the five tasks.")
    parser.add_argument("checkout", type=Path, help="folder of AgentBench's function-calling version")
    parser.add_argument("folder", type=Path, help="folder for the files, one for each task")
    parser.add_argument(
        "--split", default="std", choices=["std", "env_train"], help="split of the configuration"
    )
    options = parser.parse_args()
    checkout = Checkout(options.checkout, options.split)
    try:
        files = {
            name: json.dumps(make(checkout), indent=1, ensure_ascii=False) for name, make in TASKS.items()
        }
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = (options.folder / f"{name}.json").resolve()
            path.write_text(content + "\n", encoding="utf-8")
            print(f"export {name.upper()}_WORDING={path}")
    except (Mismatch, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
