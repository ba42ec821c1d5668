"""What the installed engine cannot do is refused before a run."""

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, GeneratorConfig
from megatron_rl.launcher import preflight

FP8 = GeneratorConfig(quantization="fp8")


@pytest.mark.parametrize("release", ["0.5.17", "0.5.20.post1"])
def test_fp8_engines_of_a_release_that_loses_how_weights_are_loaded_are_refused(
    release: str,
) -> None:
    with pytest.raises(InputError, match=f"SGLang {release}.*0.5.21 or newer.*install.sh gpu"):
        preflight.check_quantization(FP8, release)
    preflight.check_quantization(GeneratorConfig(), release)
    preflight.check_quantization(GeneratorConfig(engine="some.module:Engine"), release)


@pytest.mark.parametrize("release", ["0.5.21", "0.5.23", "0.10.0", None])
def test_fp8_engines_that_take_weights_pass(release: str | None) -> None:
    preflight.check_quantization(FP8, release)


def test_the_check_of_a_run_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed release, and before anything is read from a folder."""
    monkeypatch.setattr(preflight, "FP8_TAKES_WEIGHTS_SINCE", (99, 0, 0))
    config = Config(generator=FP8, weights={"method": "broadcast"})
    with pytest.raises(InputError, match="generator.quantization='fp8' with SGLang 0.5"):
        preflight.check(config)
