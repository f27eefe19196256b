"""The README and the documentation. Every code block is run or parsed by the program that reads it."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import agentrl_env
from agentrl_env import evaluation, sandbox, testing
from agentrl_env.__main__ import app as environment_app
from agentrl_env.fleet.config import read_fleet_config
from agentrl_env.launch.process import ServerProcess
from agentrl_env.types import SessionInfo, SessionStatus, StepResult
from agentrl_env.wire import CALLS, Frame, OpenBatch, OpenRequest, StepBody
from agentrl_train.__main__ import app as train_app
from agentrl_train.config import RunConfig, load_config
from agentrl_train.config.paths import KNOWN_MODELS, model_folder
from agentrl_train.config.toml import classes
from agentrl_train.sweep.plan import load_sweep
from docs import figures, generate, pictures
from docs.layers import PICTURE, picture

ROOT = Path(__file__).parents[1]
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = [*OUTSIDE, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL, TOKEN = "http://127.0.0.1:8000", "SECRET"
FILE_ENDINGS = {"py", "toml", "jsonl", "json", "html", "txt"}
SECTIONS = {name for name in RunConfig.model_fields if name != "environments"}
COMMANDS = {
    "agentrl-env": typer.main.get_command(environment_app),
    "agentrl-train": typer.main.get_command(train_app),
}


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def written(page: Path) -> str:
    """Return a page without its generated parts. Lines keep their numbers."""
    text = page.read_text(encoding="utf-8")
    return generate.MARKER.sub(lambda match: match[1] + "\n" * (match[0].count("\n") - 1) + match[3], text)


def blocks(page: Path) -> Iterator[Block]:
    text = written(page)
    for match in FENCE.finditer(text):
        yield Block(page, text[: match.start()].count("\n") + 1, match[1], match[2] or "", match[3])


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(language: str) -> Any:
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the tutorial's environment and an example on a free port."""
    folder = tmp_path_factory.mktemp("docs") / "guess"
    folder.mkdir()
    first = next(b for b in blocks(ROOT / "docs/tutorials/environment.md") if b.language == "python")
    (folder / "environment.py").write_text(first.text)
    with ServerProcess(str(folder), str(ROOT / "environments/household"), token=TOKEN) as running:
        yield running.url


LONG = {ROOT / "docs/tutorials/training.md"}
"""Pages with a training run longer than a few seconds."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])
        for page in PAGES
        if any(block.language == "python" for block in blocks(page))
    ],
    ids=name,
)
def test_python_blocks_of_a_page_run_in_order(
    page: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("environments", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_TOKEN", TOKEN)
    monkeypatch.setenv("AGENTRL_ALLOW_UNSAFE_SANDBOX", "1")  # used only without another sandbox
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.language == "python":
            text = "\n" * block.line + block.text.replace(URL, server)
            exec(compile(text, str(page), "exec"), vars(module))


@of("json")
def test_json_block_is_a_valid_request(block: Block) -> None:
    value = json.loads(block.text)
    if "call" in value:
        call = CALLS[Frame.model_validate(value).call]
        call.request.model_validate(value)
        return
    models = [model for model in (OpenRequest, OpenBatch, StepBody) if set(value) <= set(model.model_fields)]
    assert models
    models[0].model_validate(value)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a cache that has every known model, as an empty folder."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    for name in KNOWN_MODELS:
        model_folder(name).mkdir(parents=True)


@pytest.mark.usefixtures("fetched")
@of("toml")
def test_toml_block_is_accepted_by_its_command(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("environments", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "token.txt").write_text(TOKEN)
    file = tmp_path / (block.title or "file.toml")
    file.write_text(block.text)
    keys = tomllib.loads(block.text)
    if "run" in keys:
        load_config(file)
    elif "config" in keys:
        load_sweep(file, cores=2)
    elif "tasks" in keys:
        read_fleet_config(file)
    else:
        command = file.stem
        context = COMMANDS["agentrl-env"].commands[command].make_context(command, ["--config", str(file)])
        assert {key.replace("-", "_") for key in keys} <= set(context.params)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("block", [b for b in BLOCKS if "curl" in b.text and URL in b.text], ids=str)
def test_requests_of_curl_are_answered(block: Block, server: str, tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text(TOKEN)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block.text.replace(URL, server)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "no_proxy": "*"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "desk: " in json.loads(done.stdout)["messages"][0]["content"]


@pytest.mark.usefixtures("fetched")
@of("sh")
def test_command_lines_have_known_commands_and_options(block: Block) -> None:
    if "curl" in block.text:
        return  # another test runs it
    lines = block.text.replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line.replace("$PWD/.venv-vllm/bin/python", sys.executable), comments=True)
        if words:
            check_command(words, block.page)


def check_command(words: list[str], page: Path) -> None:
    words = words[: words.index(">")] if ">" in words else words
    assert "--token" not in words, "other users can read command lines"
    program, *arguments = words
    if program == "python":
        compile(arguments[1], "python -c", "exec")
    elif program == "make":
        check_make(arguments)
    elif program == "torchrun":
        at = arguments.index("-m")
        assert arguments[at + 1] == "agentrl_train"
        check_command(["agentrl-train", *arguments[at + 2 :]], page)
    elif program in COMMANDS:
        check_options(program, *arguments, page=page)
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK), f"{program} is not a command of this checkout"
    else:
        assert program == "docker"


def check_options(program: str, command_name: str, *arguments: str, page: Path | None = None) -> None:
    """Parse a command line as the command does, without running callbacks."""
    command = COMMANDS[program].commands[command_name]
    given, rest, _ = command.make_parser(command.context_class(command)).parse_args(list(arguments))
    assert not rest
    for parameter in command.params:
        if parameter.required:
            assert given.get(parameter.name) is not None, f"{command_name} needs {parameter.name}"
    if given.get("config", "CONFIG.toml") != "CONFIG.toml" and "overrides" in {
        p.name for p in command.params
    }:
        shown = {block.title for block in BLOCKS if block.page == page}  # another test checks their text
        if given["config"] not in shown:
            load_config(ROOT / given["config"], given.get("overrides") or [])


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable, equals, value = argument.partition("=")
        if not equals:
            assert re.search(rf"^{argument}:", makefile, re.MULTILINE), f"missing target {argument}"
            continue
        assert f"$({variable})" in makefile
        if arguments[0] == "train":
            check_options(
                "agentrl-train", "run", str(ROOT / "examples/quickstart/train.toml"), *shlex.split(value)
            )


def test_make_help_lists_every_target_with_its_comment() -> None:
    commented = re.findall(r"^([a-z-]+):.*## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [tuple(line.split(None, 1)) for line in done.stdout.splitlines()] == commented
    assert {"setup", "train", "test", "lint", "docs", "help"} <= {target for target, _ in commented}


def test_every_silent_installation_of_make_is_announced() -> None:
    rules = re.findall(r"^(\S+):[^=\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installing = {
        target: recipe for target, recipe in rules if re.search(r"\$\(PIP\)|--quiet install", recipe)
    }
    assert {"$(VENV)/.train", "$(VLLM)/.installed"} <= installing.keys()
    assert [t for t, recipe in installing.items() if not recipe.startswith("\t$(call INSTALLING")] == []
    command = ["make", "--no-print-directory", "-n", "-W", "pyproject.toml", ".venv/.train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    announced = "installing packages for .venv/.train: this takes about 3 minutes, and pip shows nothing"
    assert announced in done.stdout


def test_every_block_has_a_language_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "json", "toml", "sh", "text"}
    assert all(page.read_text().count("\n```") % 2 == 0 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_settings_exist(page: Path) -> None:
    for path in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", written(page)):
        section, *keys = path.split(".")
        if section in SECTIONS and keys[-1] not in FILE_ENDINGS:
            assert_is_setting(path, [section, *keys])


def assert_is_setting(path: str, keys: list[str]) -> None:
    models: list[Any] = [RunConfig]
    for number, key in enumerate(keys):
        if path.startswith("engine.vllm.args.") and number == 3:
            return  # passed to vLLM
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        assert fields, f"unknown setting {path}"
        models = [kind for field in fields for kind in classes(field.annotation)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    text = written(page)
    for path in re.findall(
        r"`((?:agentrl_env|agentrl_train|tests|environments|examples|docs)/[^` ]*)`", text
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", OUTSIDE, ids=name)
def test_links_of_files_outside_the_site_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https:") or (page.parent / target).exists(), target


def test_generated_text_is_current() -> None:
    """Also fails for public names without a docstring."""
    assert len(generate.pages()) > 10
    assert generate.stale_pages() == [], "outdated; run make docs-text"


def test_wire_page_lists_every_call_and_status() -> None:
    text = (ROOT / "docs/wire.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| `" in line]
    expected = []
    for call in CALLS.values():
        request, answer = (
            f"`{kind.__name__}`" if kind else "" for kind in (call.body or call.query, call.answer)
        )
        route, agent = f"`{call.method} {call.path}`", "yes" if call.agent else ""
        expected.append([f"`{call.name}`", route, request, f"{call.status} {answer}".strip(), agent])
    assert sorted(row[:5] for row in rows if len(row) == 6) == sorted(expected)
    statuses = [status for row in rows for status in re.findall(r"`(\w+)`", row[0]) if len(row) == 2]
    assert set(SessionStatus) <= set(statuses)
    for model in (StepResult, SessionInfo):
        assert set(model.model_fields) <= set(statuses)


def test_reference_has_every_public_name() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    for package in (agentrl_env, evaluation, sandbox, testing):
        for public in set(package.__all__) - {"__version__"}:
            found = getattr(package, public)
            if isinstance(found, type) or callable(found):
                path = f"{found.__module__}.{found.__name__}"
                assert f"api {path} -->" in reference or f"api {found.__module__} -->" in reference, public


def test_extras_in_the_text_exist_under_normalized_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = ("agentrl_env", "agentrl_train", "environments", "examples", "docs")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py")
    ]
    text = "\n".join(path.read_text() for path in [*files, ROOT / "README.md", ROOT / "Makefile"])
    named = re.findall(r"(?:agentrl-kit|'\.)\[([a-z0-9_,. -]+)\]", text)
    asked = {extra.strip() for names in named for extra in names.split(",")}
    assert len(asked) > 10
    assert asked <= extras.keys()
    assert [extra for extra in extras if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", extra)] == []


def test_picture_of_the_layers_is_current() -> None:
    assert PICTURE.read_text() == picture(), "outdated; run python -m docs.layers"


@pytest.mark.parametrize("page", [page for page in PAGES if "images/" in page.read_text()], ids=name)
def test_pictures_of_pages_are_small_and_have_light_and_dark_versions(page: Path) -> None:
    text = page.read_text()
    found = list(pictures.PICTURE.finditer(text))
    assert len(found) == text.count("<picture>") == text.count("<source ")
    for match in found:
        assert match["dark"] == match["light"].replace("-light.png", "-dark.png")
        for mode in ("light", "dark"):
            content = (page.parent / match[mode]).read_bytes()
            assert len(content) < 150_000
            assert int.from_bytes(content[16:20]) == 2 * int(match["width"]), "two pixels for each CSS pixel"
    for source in re.findall(r'src(?:set)?="([^"]+)"', text):
        assert (page.parent / source).exists(), source


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in pictures.IMAGES.iterdir() if f"images/{path.name}" not in text] == []


def test_site_has_both_modes_of_a_picture_as_images_checked_by_mkdocs() -> None:
    page = (ROOT / "docs/index.md").read_text()
    images = re.findall(
        r"^!\[[^\]]+\]\(([^)]+)\)\{ width=\d+ \}$", pictures.on_page_markdown(page), re.MULTILINE
    )
    assert images[:2] == ["images/report-light.png#only-light", "images/report-dark.png#only-dark"]
    assert len(images) == 2 * page.count("<picture>")


def test_figures_of_the_algorithms_are_current() -> None:
    for figure, draw in figures.DRAWINGS.items():
        assert (figures.FIGURES / f"{figure}.svg").read_text() == draw(), "outdated; run make docs-text"


def test_troubleshooting_names_the_queue_of_a_full_server_in_requests_and_in_python() -> None:
    (row,) = [r for r in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if "`server_full`" in r]
    assert "wait_s" in OpenRequest.model_fields
    assert "wait" in inspect.signature(agentrl_env.EnvClient.open).parameters
    assert "`wait_s`" in row
    assert "`wait`" in row


def test_messages_in_troubleshooting_match_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    code = "".join(
        path.read_text()
        for package in ("agentrl_env", "agentrl_train")
        for path in (ROOT / package).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    first = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ")]
    parts = [
        part.strip() for cell in first for text in re.findall("`([^`]+)`", cell) for part in text.split("…")
    ]
    assert len(parts) > 20
    assert [part for part in parts if part not in joined] == []
