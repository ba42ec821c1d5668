"""A trainer and a generator whose NCCL settings differ are told so."""

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.nccl_settings import CHOSEN, call_limit, check_settings, own_settings

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def test_settings_that_agree_are_taken() -> None:
    check_settings({CUMEM: "1", NVLS: "2"}, {CUMEM: "1", NVLS: "2"})


@pytest.mark.parametrize(
    ("own", "theirs", "told"),
    [
        (
            {CUMEM: "1", NVLS: "2"},
            {CUMEM: "0", NVLS: "2"},
            f"^{CUMEM} is 1 at the .* and 0 at",
        ),
        ({CUMEM: "1", NVLS: "2"}, {CUMEM: "1", NVLS: ""}, f"^{NVLS} is 2 at the .* not set at"),
        ({CUMEM: "1", NVLS: ""}, {CUMEM: "1", NVLS: "2"}, f"^{NVLS} is not set at the .* and 2 at"),
        # SGLang sets both to 0 for its ranks, where nobody did.
        ({CUMEM: "", NVLS: ""}, {CUMEM: "", NVLS: ""}, f"{CUMEM} .*, {NVLS} .*set the same on"),
        ({CUMEM: "1", NVLS: "2"}, {}, "1 at the trainer and not set at the generator"),
    ],
)
def test_settings_that_differ_or_are_left_to_an_engine_are_refused(
    own: dict[str, str], theirs: dict[str, str], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        check_settings(own, theirs)


def test_own_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUMEM, "0")
    monkeypatch.delenv(NVLS, raising=False)
    assert own_settings() == {CUMEM: "0", NVLS: ""} and own_settings().keys() == CHOSEN.keys()


@pytest.mark.parametrize(("timeout_s", "limit"), [(0.2, "1"), (1.0, "1"), (119.5, "120")])
def test_the_limit_of_a_call_is_in_whole_seconds(timeout_s: float, limit: str) -> None:
    assert call_limit(timeout_s) == limit
