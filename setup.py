"""Packaging of megatron-rl. `bash tools/install.sh` installs it with its components."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def read_pins(name: str) -> list[str]:
    """Pins of requirements/NAME.txt, without comments and blank lines."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


setup(
    name="megatron-rl",
    version="0.1.0",
    description="Asynchronous RL for language models on Megatron-Core and SGLang",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # No `install_requires`: CPU and GPU need different builds of the same components. The extra
    # `cpu` lacks SGLang, which only tools/install.sh can add: see requirements/cpu-nodeps.txt.
    extras_require={name: read_pins(name) for name in ("cpu", "gpu", "dev")},
    packages=find_namespace_packages(include=["megatron_rl*", "generation*", "verification*"]),
    package_data={
        "": ["*.json", "*.jinja", "*.toml", "*.txt", "*.cpp", "*.h", "*.html", "*.js", "*.css"]
    },
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.launcher.cli:main"]},
)
