"""The distributions of a release: versions, files, and commands without a checkout."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agentrl_env import __version__
from agentrl_train.cli.quickstart import free_name, write_config
from agentrl_train.errors import ConfigError
from release.dist import PROJECTS, TRIALS, build, try_commands
from release.oldest import constraints

ROOT = Path(__file__).parents[1]
TASKS = sorted(path.parent for path in ROOT.glob("environments/**/environment.py"))
TINY = "--set run.steps=1 --set eval.samples=0 --set rollout.groups_per_step=3 --set rollout.group_size=2"


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", PROJECTS)
def test_every_distribution_has_the_version_of_agentrl_env(folder):
    content = project(folder)
    assert "version" in content["project"]["dynamic"]
    source = (ROOT / folder / content["tool"]["hatch"]["version"]["path"]).resolve()
    assert source == ROOT / "agentrl_env/__init__.py"


def test_citation_and_changelog_name_the_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [__version__]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_every_task_is_published_under_the_name_of_its_folder():
    published = project("release/tasks")["project"]["entry-points"]["agentrl_env.tasks"]
    assert set(published) == {folder.name for folder in TASKS}
    assert len(TASKS) >= 20
    for name, value in published.items():
        target = EntryPoint(name, value, "agentrl_env.tasks")
        folder = next(folder for folder in TASKS if folder.name == name)
        inside = folder.relative_to(ROOT / "environments").parts
        assert target.module == ".".join(("agentrl_tasks", *inside, "environment"))
        source = (folder / "environment.py").read_text()
        assert re.search(rf"^class {target.attr}\(", source, re.MULTILINE)


def test_tasks_package_has_every_task_and_the_quick_start_of_the_checkout():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "release/tasks/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.CheckoutFiles(str(ROOT / "release/tasks"), {}, None, None, "", "wheel")
    build_data = {"force_include": {}}
    hook.initialize("standard", build_data)
    packaged = {target: Path(source) for source, target in build_data["force_include"].items()}
    whole = {folder for folder in TASKS if folder.parent == ROOT / "environments"}
    assert {f"agentrl_tasks/{folder.name}" for folder in whole} < set(packaged)
    config = tomllib.loads(packaged["agentrl_tasks/quickstart/train.toml"].read_text())
    assert config["environments"] == [{"serve": ["household", "shop", "sql"]}]
    assert config["model"] == {"path": "package:agentrl-tasks"}
    hook.finalize("standard", build_data, "")
    checkout = tomllib.loads((ROOT / "examples/quickstart/train.toml").read_text())
    assert {**config, "environments": 0, "model": 0} == {**checkout, "environments": 0, "model": 0}
    assert packaged["agentrl_tasks/quickstart/starter"].samefile(ROOT / "examples/quickstart/starter")
    with pytest.raises(ValueError, match="names its tasks or its model in another way"):
        module.packaged_config('[model]\npath = "other"\n')


def test_quick_start_keeps_an_edited_configuration_and_chooses_a_free_name(tmp_path):
    (tmp_path / "quickstart.toml").write_text("changed")
    assert write_config(tmp_path).read_text() == "changed"
    assert free_name(tmp_path) == "quickstart"
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart-2").mkdir()
    assert free_name(tmp_path) == "quickstart-3"


def test_quick_start_without_the_tasks_package_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl_train.cli.quickstart.PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="needs the package agentrl-tasks"):
        write_config(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build the wheels of the working tree."""
    pytest.importorskip("build")
    files = build(ROOT, tmp_path_factory.mktemp("dist"))
    assert [path.name.split("-")[0] for path in files] == ["agentrl_kit"] * 2 + ["agentrl_tasks"] * 2
    return [path for path in files if path.suffix == ".whl"]


@pytest.mark.slow
def test_wheels_contain_the_packages_and_no_tests(wheels):
    kit, tasks = wheels
    names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in (kit, tasks)]
    tops = [{name.partition("/")[0] for name in found if ".dist-info/" not in name} for found in names]
    assert tops == [{"agentrl_env", "agentrl_train"}, {"agentrl_tasks"}]
    for package in ("agentrl_env", "agentrl_train"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert sources <= names[0]
    assert "agentrl_env/cli/template/environment.py.template" in names[0]
    inside = {folder.relative_to(ROOT / "environments").as_posix() for folder in TASKS}
    assert {f"agentrl_tasks/{place}/environment.py" for place in inside} <= names[1]
    assert "agentrl_tasks/quickstart/starter/model.safetensors" in names[1]
    everything = names[0] | names[1]
    assert not [name for name in everything if "__pycache__" in name or "/tests/" in name or "/runs/" in name]


@pytest.mark.slow
def test_commands_work_with_only_the_wheels(wheels, tmp_path):
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", *map(str, wheels)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # The dependencies of this environment, but not an editable install of the checkout.
    present = [path for path in sys.path if path.endswith("-packages")]
    (site / "present.pth").write_text("\n".join(present))
    where = "import agentrl_env, agentrl_train as t; print(agentrl_env.__file__, t.__file__)"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", where], cwd=empty, env=inherited, capture_output=True, text=True)
    assert done.stdout.count(str(site)) == 2, done.stderr
    quick = [trial for trial in TRIALS if "quickstart" not in trial and "check" not in trial]
    assert len(quick) >= 4
    try_commands(environment, empty, (*quick, f"agentrl-train quickstart {TINY}"))
    assert (empty / "runs/quickstart/summary.json").is_file()
    config = tomllib.loads((empty / "runs/quickstart.toml").read_text())
    assert config["run"]["steps"] == 50


def test_every_dependency_has_an_oldest_release():
    settings = project(".")["project"]
    optional = settings["optional-dependencies"]
    listed = [*settings["dependencies"], *(one for extra in optional.values() for one in extra)]
    found = constraints(settings, list(optional))
    assert {one.split("==")[0] for one in found} == {re.split(r"[>=;\[]", one)[0] for one in listed}


def test_oldest_release_is_the_highest_lower_bound_of_a_dependency():
    settings = {
        "dependencies": ["a>=1.2,<2", "b[x]>=3; sys_platform == 'linux'"],
        "optional-dependencies": {"more": ["c==4", "a>=1.10"], "other": ["d>=5"]},
    }
    assert constraints(settings, []) == ["a==1.2", "b==3"]
    assert constraints(settings, ["more"]) == ["a==1.10", "b==3", "c==4"]
    with pytest.raises(ValueError, match="e<2 has no lower bound: add one"):
        constraints({**settings, "dependencies": ["e<2"]}, [])
