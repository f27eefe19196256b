"""The build context of an image, without a daemon."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from agentrl_env.errors import LaunchError, TargetError
from agentrl_env.launch.image_context import BuildContext, TaskFiles, make_wheel, wheel_name


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my game"
    (folder / "data").mkdir(parents=True)
    (folder / "environment.py").write_text("x = 1\n")
    (folder / "data" / "words.txt").write_text("a b\n")
    return folder


def context(target, **options):
    """Return the files of a build context by name, and the archive."""
    build = BuildContext(task=TaskFiles.of(str(target)), base="python:3.11-slim", **options)
    file = io.BytesIO()
    build.write(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        return {member.name: member.isfile() and tar.extractfile(member).read() for member in tar}, file


def test_task_files_are_included_under_a_plain_name(folder):
    files, _ = context(folder)
    assert files["task/my_game/environment.py"] == b"x = 1\n"
    assert files["task/my_game/data/words.txt"] == b"a b\n"
    assert b'"serve", "/srv/my_game"' in files["Dockerfile"]


def test_equal_files_make_equal_contexts(folder):
    first = context(folder)[1].getvalue()
    (folder / "environment.py").touch()
    assert context(folder)[1].getvalue() == first


def test_ignored_files_are_omitted(folder):
    for name in (
        ".git/config",
        ".venv/bin/python",
        "__pycache__/x.pyc",
        "data/__pycache__/y.pyc",
        ".env",
        "own",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    (folder / ".dockerignore").write_text("# ours\nown\n")
    files, _ = context(folder)
    assert b"secret" not in files.values()


def test_requirements_of_task_and_caller_are_installed_together(folder):
    (folder / "requirements.txt").write_text("# why\nnumpy<2  # because\n\npandas\n")
    files, _ = context(folder, requirements=("agentrl-kit[otel, redis]", "rich>14"))
    assert files["install/requirements.txt"].decode().splitlines() == [
        f"/install/{wheel_name()}[otel,redis]",
        "rich>14",
        "numpy<2",
        "pandas",
    ]


def test_wheelhouse_disables_the_index_and_certificates_are_only_in_the_build_stage(folder, tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "ca.pem").write_bytes(b"certificate")
    files, _ = context(folder, wheelhouse=tmp_path / "wheels", ca=tmp_path / "ca.pem")
    assert files["install/wheels/a-1-py3-none-any.whl"] == b"wheel"
    assert files["install/ca.crt"] == b"certificate"
    build, final = files["Dockerfile"].decode().split("\nFROM ")
    assert build.count("--no-index --find-links /install/wheels") == 2
    assert "PIP_CERT=/install/ca.crt" in build
    assert "install" not in final
    assert "ca.crt" not in final


def test_debian_packages_must_be_plain_names(folder):
    (folder / "packages.txt").write_text("git  # to clone\nlibfoo-dev=1.2-3\n")
    assert b"--no-install-recommends git libfoo-dev=1.2-3 &&" in context(folder)[0]["Dockerfile"]
    (folder / "packages.txt").write_text("git; rm -rf /\n")
    with pytest.raises(LaunchError, match="is not a Debian package name"):
        context(folder)


def test_symlink_out_of_the_task_is_rejected(folder):
    (folder / "here").symlink_to("environment.py")
    (folder / "there").symlink_to("/etc/passwd")
    with pytest.raises(LaunchError, match=r"there links to /etc/passwd.*\.dockerignore"):
        context(folder)
    (folder / ".dockerignore").write_text("there\n")
    assert "task/my_game/here" in context(folder)[0]


def test_files_and_modules_are_targets(folder):
    assert TaskFiles.of(f"{folder}/environment.py:Game").target == "/srv/my_game/environment.py:Game"
    module = TaskFiles.of("agentrl_env.testing:Probe")
    assert (module.name, module.target) == ("agentrl_env", "agentrl_env.testing:Probe")
    assert module.root == Path(sys.modules["agentrl_env"].__file__).parent


@pytest.mark.parametrize("target", ["nowhere", "nowhere.py:Game", "no_such_module_at_all:Game", "/tmp"])
def test_missing_target_is_rejected(target):
    with pytest.raises(TargetError, match=target):
        TaskFiles.of(target)


def test_wheel_installs_and_its_version_without_files_has_the_same_metadata(tmp_path):
    wheel = tmp_path / wheel_name()
    wheel.write_bytes(make_wheel(files=True))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    subprocess.run([*command, tmp_path / "site", wheel], check=True, timeout=60)
    assert (tmp_path / "site/agentrl_env/cli/template/environment.py.template").is_file()
    assert (tmp_path / "site/bin/agentrl-env").is_file()
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(io.BytesIO(make_wheel(files=False))) as bare:
        (metadata,) = (name for name in bare.namelist() if name.endswith("METADATA"))
        assert bare.read(metadata) == full.read(metadata)
        assert b"Requires-Dist: pydantic" in bare.read(metadata)
        assert not any(name.startswith("agentrl_env/") for name in bare.namelist())
