"""Images: what Dockerfile copies is there, and its steps make an environment from a wheel folder.

Docker is not needed: the steps run in a folder of the test, with empty wheels for components.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tools.stub_project import GPU_PINS, STUB_ENGINE, Project, write_sdist, write_wheel
from tests.wheel_venv import ROOT, copy_tree

pytestmark = [pytest.mark.slow(30), pytest.mark.timeout(300)]

TOOLS_TESTS = ROOT / "tests" / "tools"
INSTALLER = (ROOT / "tools" / "install.sh").read_text()
IMAGES = [ROOT / "Dockerfile", ROOT / "Dockerfile.cpu", ROOT / ".devcontainer" / "Dockerfile"]
BUILDER = shutil.which("buildah")
IN_CONTEXT = pytest.mark.parametrize("image", IMAGES[:2], ids=lambda path: path.name)
NAMED = pytest.mark.parametrize("image", IMAGES, ids=lambda path: str(path.relative_to(ROOT)))


class Step(NamedTuple):
    """One instruction: its word, and the rest with continued lines joined."""

    word: str
    text: str


def steps_of(path: Path) -> list[Step]:
    """Instructions of a Dockerfile without heredocs, as Docker reads them."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [Step(word, text) for word, text in found]


def defaults_of(steps: list[Step]) -> dict[str, str]:
    """ARG and ENV."""
    pairs = [pair for word, text in steps if word in ("ARG", "ENV") for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)


def filled(text: str, values: dict[str, str]) -> str:
    """With ${NAME} replaced."""
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


def system_packages(steps: list[Step]) -> set[str]:
    """Those of the one apt-get install."""
    (text,) = (text for word, text in steps if word == "RUN" and "apt-get install" in text)
    words = text.partition("--no-install-recommends")[2].split("&&")[0].split()
    return {word.rstrip(";") for word in words} - {"fi"}


def pin(name: str) -> str:
    (found,) = re.findall(
        rf"^{name}==(\S+)$", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE
    )
    return found


@NAMED
def test_every_step_is_a_known_one_and_its_shell_is_sound(image: Path) -> None:
    steps = steps_of(image)
    # Not SHELL, which podman and buildah leave out of an OCI image: they run a step by /bin/sh.
    known = {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {step.word for step in steps} <= known
    for step in steps:
        if step.word == "RUN":
            subprocess.run(["sh", "-n", "-c", step.text], check=True, timeout=60)


@NAMED
def test_the_image_has_the_system_packages_that_the_installer_asks_for(image: Path) -> None:
    asked = INSTALLER.partition("missing_packages() {")[2].partition("\n}\n")[0]
    names = set(re.findall(r"echo ([a-z][\w+-]*)$", asked, re.MULTILINE))
    names |= {"python3", "python3-venv", "python3-dev"}
    assert len(names) >= 6
    assert system_packages(steps_of(image)) >= names | {"util-linux"}


def test_the_base_has_the_compiler_of_the_pins() -> None:
    base = defaults_of(steps_of(ROOT / "Dockerfile"))["BASE"]
    release = re.search(r":(\d+\.\d+)\.\d+-devel-", base)
    assert release is not None
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "cuda-toolkit"):
        assert pin(name).startswith(f"{release[1]}.")


@IN_CONTEXT
def test_the_file_repeats_no_pin_and_copies_what_is_there(image: Path) -> None:
    steps = steps_of(image)
    assert not [text for _, text in steps if re.search(r"==\d", text)]
    values = defaults_of(steps)
    copied = [filled(text, values).split()[:-1] for word, text in steps if word == "COPY"]
    sources = [source for words in copied for source in words]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {"megatron_rl", "generation", "verification", "requirements", "setup.py"} <= set(sources)


def copy(text: str, context: Path, inside: Path) -> None:
    """COPY: of a folder its content, as Docker does."""
    *sources, target = text.split()
    for source in sources:
        to = inside / target.lstrip("/")
        if (context / source).is_dir():
            shutil.copytree(context / source, to, dirs_exist_ok=True)
        else:
            to = to / source if target.endswith("/") else to
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(context / source, to)


def offline_context(folder: Path) -> None:
    """A clone whose GPU components are empty wheels in its folder `wheels`."""
    copy_tree(folder)
    (folder / "requirements" / "gpu.txt").write_text(GPU_PINS)
    wheels = folder / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "torch", "2.14.1")
    headers = {f"nvidia/{part}/include/{part}.h": "" for part in ("cudnn", "nccl")}
    write_wheel(wheels, "stub_nvidia", "1.0", headers)
    engine = STUB_ENGINE.format(tests=TOOLS_TESTS)
    write_sdist(wheels, "transformer_engine_torch", "2.12.0", engine)


def bring_setuptools(venv: Path) -> None:
    """That of the tests, and what our package imports: the real pins bring them."""
    for packages in venv.glob("lib/*/site-packages"):
        for own in ("setuptools", "_distutils_hack"):
            shutil.rmtree(packages / own, ignore_errors=True)
        (packages / "distutils-precedence.pth").unlink(missing_ok=True)
        (packages / "real.pth").write_text(sysconfig.get_path("purelib") + "\n")


def test_the_steps_make_an_environment_without_network(tmp_path: Path) -> None:
    context, inside = tmp_path / "context", tmp_path / "inside"
    offline_context(context)
    inside.mkdir()
    steps = steps_of(ROOT / "Dockerfile")
    values = defaults_of(steps) | {"APT": "0", "WHEELS": "wheels", "PIP_NO_INDEX": "1"}
    venv = inside / "opt" / "megatron-rl"
    values |= {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin{os.pathsep}{os.environ['PATH']}"}
    environment = values | {"PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}
    for word, text in steps:
        if word == "COPY":
            copy(filled(text, values), context, inside)
        elif word == "RUN":
            done = subprocess.run(
                ["sh", "-c", text.replace("/build", f"{inside}/build")],
                cwd=inside, env=environment, capture_output=True, text=True, timeout=150,
            )  # fmt: skip
            assert done.returncode == 0, text + done.stdout + done.stderr
            bring_setuptools(venv)
    compiled = json.loads((venv / "compiled.json").read_text())
    installer = dict(re.findall(r"(NVTE_\w+)=(\w+)", INSTALLER))
    assert {name: compiled[name] for name in installer} == installer and len(installer) == 2
    headers = compiled["CPLUS_INCLUDE_PATH"].split(":")
    assert [Path(path).parent.name for path in headers] == ["cudnn", "nccl"]
    assert compiled["CUDA_HOME"] == "/usr/local/cuda"
    listed = subprocess.run(
        [venv / "bin" / "megatron-rl", "config", "list"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert listed.returncode == 0 and "magistral_24b" in listed.stdout, listed.stderr
    assert (venv / "examples" / "launch.sh").exists() and not (inside / "build").exists()


def test_the_steps_of_the_cpu_image_are_the_installer_on_a_folder_of_packages(
    tmp_path: Path,
) -> None:
    project = Project(tmp_path)
    steps = steps_of(ROOT / "Dockerfile.cpu")
    values = defaults_of(steps) | {"APT": "0", "WHEELS": "wheels"}
    shutil.copytree(project.wheels, project.root / "wheels")
    write_wheel(project.root / "wheels", "uv", "0.13.9")
    inside, said = tmp_path / "inside", ""
    # Its components are few, so it has less than a clone.
    for name in ("README.md", "LICENSE", "examples/a.sh", "generation/a.py", "verification/a.py"):
        (project.root / name).parent.mkdir(exist_ok=True)
        (project.root / name).touch()
    root = inside / "opt" / "megatron-rl"
    root.mkdir(parents=True)
    shutil.copy(project.root / "stub_backend.py", root)
    environment = project.environment() | {"APT": "0", "PIP_FIND_LINKS": "/none"}
    del environment["PIP_NO_INDEX"]
    for word, text in steps:
        if word == "COPY":
            copy(filled(text, values), project.root, inside)
        elif word == "RUN":
            for folder in ("/build", "/opt"):
                text = text.replace(folder, f"{inside}{folder}")
            done = subprocess.run(
                ["sh", "-c", text],
                env=environment, capture_output=True, text=True, timeout=150,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            said += done.stdout
    assert f"packages come from {inside}/build/wheels alone" in said
    found = {path.stem for path in (root / ".venv" / "lib").rglob("*.py")}
    assert found >= {"torch", "stub_other", "stub_dev"}
    assert {path.stem for path in (root / ".venv" / "sglang-only").glob("*.py")} == {"stub_vision"}
    assert (root / ".venv" / ".installed").exists() and not (inside / "build").exists()
    # The command is where the environment of the image looks for it.
    assert values["PATH"].startswith("/opt/megatron-rl/.venv/bin:")


@pytest.mark.exhaustive
@pytest.mark.skipif(BUILDER is None, reason="buildah is not here")
@pytest.mark.timeout(1800)
def test_the_cpu_image_is_built_and_trains(tmp_path: Path) -> None:
    """Its last step imports every component. IMAGE_ARGUMENTS: such as --build-arg BASE=..., where
    there is no network; BUILDAH_ISOLATION=chroot where no container can be started."""
    assert BUILDER is not None
    more = shlex.split(os.environ.get("IMAGE_ARGUMENTS", ""))
    command = [BUILDER, "build", "-t", "megatron-rl-cpu", "-f", "Dockerfile.cpu", *more, "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    made = subprocess.run([BUILDER, "from", "megatron-rl-cpu"], capture_output=True, check=True)
    container = made.stdout.decode().strip()
    script = "/opt/megatron-rl/examples/quickstart.sh"
    given = ["--volume", f"{tmp_path}:/workspace", container, "bash", script]
    try:
        subprocess.run(
            [BUILDER, "run", *given, "--tiny", "--run-dir", "/workspace/first"],
            check=True, timeout=500,
        )  # fmt: skip
    finally:
        subprocess.run([BUILDER, "rm", container], check=True)
    found = json.loads((tmp_path / "first" / "summary.json").read_text())
    error = found["accuracy_se_before"] + found["accuracy_se_after"]
    assert found["accuracy_after"] > found["accuracy_before"] + 4 * error


def test_the_devcontainer_names_what_is_there() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).is_file()
    for script in re.findall(r"bash (\S+)", settings["postCreateCommand"]):
        assert (ROOT / script).is_file()
    pinned = (ROOT / "requirements" / "dev.txt").read_text()
    assert "pre-commit install" in settings["postCreateCommand"] and "pre_commit==" in pinned
