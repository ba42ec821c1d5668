"""Packaging of megatron-rl. `bash tools/install.sh` installs it with its components.

`pip wheel --no-deps .` makes a wheel that needs no clone: docs/install.md.
"""

import ast
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGES = ("megatron_rl", "generation", "verification")
# Where a wheel has the configurations of examples/, which megatron_rl/config/shipped.py reads.
INSTALLED_EXAMPLES = Path("megatron_rl") / "examples"


class BuildWithExamples(build_py):
    """Also takes examples/*.toml into the package, which stay beside the scripts of a clone."""

    def run(self) -> None:
        """Copy them, unless the packages are used where they are."""
        self._remove_earlier_build()
        super().run()
        if not self.editable_mode:
            for source, target in self._examples():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Every file that `run` leaves."""
        outputs = super().get_outputs(include_bytecode)
        return outputs + [str(target) for _, target in self._examples() if not self.editable_mode]

    def get_source_files(self) -> list[str]:
        """What a source package holds, beside this file: a wheel is made of it alone."""
        more = [source for source, _ in self._examples()] + sorted(ROOT.glob("requirements/*.txt"))
        return super().get_source_files() + [str(path.relative_to(ROOT)) for path in more]

    def _remove_earlier_build(self) -> None:
        # A module that is gone from the source would come along.
        built = Path(self.build_lib).resolve()
        if built != ROOT.resolve():
            for package in PACKAGES:
                shutil.rmtree(built / package, ignore_errors=True)

    def _examples(self) -> list[tuple[Path, Path]]:
        source, target = ROOT / "examples", Path(self.build_lib) / INSTALLED_EXAMPLES
        files = [*source.glob("*.toml"), *source.glob("recipes/*.toml")]
        return [(path, target / path.relative_to(source)) for path in sorted(files)]


def read_version() -> str:
    """That of the package, read without importing it."""
    tree = ast.parse((ROOT / "megatron_rl" / "__init__.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )


def read_pins(name: str) -> list[str]:
    """Pins of requirements/NAME.txt, without comments and blank lines."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


LIGHT = (
    "typer", "rich", "psutil", "pydantic", "tomli_w", "msgspec", "pyzmq", "numpy", "xxhash",
    "Jinja2", "fsspec",
)  # fmt: skip
"""What `megatron-rl doctor`, `config`, `plan` and `data` need, which say what else is missing."""


def read_pin(package: str, name: str) -> str:
    """The pin of one package in requirements/NAME.txt."""
    return next(pin for pin in read_pins(name) if pin.partition("==")[0] == package)


setup(
    cmdclass={"build_py": BuildWithExamples},
    name="megatron-rl",
    version=read_version(),
    description="Asynchronous RL for language models on Megatron-Core and SGLang",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    # The rest are extras: CPU and GPU need different builds of the same components. The extra
    # `cpu` lacks SGLang, which only tools/install.sh can add: see requirements/cpu-nodeps.txt.
    install_requires=[read_pin(package, "cpu").replace("==", ">=") for package in LIGHT],
    extras_require={name: read_pins(name) for name in ("cpu", "gpu", "dev")}
    | {"wandb": [read_pin("wandb", "dev").replace("==", ">=")]},
    packages=find_namespace_packages(include=[f"{name}*" for name in PACKAGES]),
    package_data={
        "": ["*.json", "*.jinja", "*.toml", "*.txt", "*.cpp", "*.h", "*.html", "*.js", "*.css"]
    },
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.cli.main:main"]},
)
