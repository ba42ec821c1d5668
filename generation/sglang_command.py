"""Command line and environment of SGLang's server.

Used by `sglang_engine.py`. SGLang is not imported here.
"""

import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from generation.engine import EngineSetup
from generation.sglang_orders import ORDERS_VARIABLE, orders_path
from generation.text_models import FOLDER_VARIABLE
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.config.generator import Argument
from megatron_rl.protocol.engine_requests import DETERMINISTIC_VARIABLE
from megatron_rl.protocol.whole_file import write_private
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Family

MEETS_BY = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
NEVER_STREAM_TOKENS = 1_000_000
SERVER_KEEP_ALIVE_S = 3600
CONTEXT_MARGIN = 8
"""Tokens more than sequences may have. SGLang 0.5.23 refuses inputs within 6 tokens of its context
or its cache (managers/tp_worker.py:572), and ends replies 2 tokens before either."""
RELEASED = ["kv_cache", "weights"]
"""Tags of memory that an engine releases. Not SGLang's third, "cuda_graph": 0.5.23 copies the
memory of graphs to the host for it, and warns that graphs with NCCL may hang afterwards
(`runner_backend/full_cuda_graph_backend.py`, `arg_groups/parallel_hook.py`)."""


RANKS_FILE, KEY_FILE = "ranks", "api_key.yaml"


def write_api_key(folder: Path) -> str:
    """Draw a key for the server's HTTP requests and write it for `server_command`; returns it.

    A file, because every user of a host can read command lines. folder: only its user gets in.
    """
    key = secrets.token_hex(32)
    write_private(folder / KEY_FILE, f"api-key: {key}\n")
    return key


def server_command(setup: EngineSetup, loader: str, folder: Path | None = None) -> list[str]:
    """Command line of the server; see `server_arguments`."""
    launch = [sys.executable, "-m", "sglang.launch_server"]
    return launch + server_arguments(setup, loader, folder)


def server_arguments(setup: EngineSetup, loader: str, folder: Path | None = None) -> list[str]:
    """Arguments of the server; loader: the function that receives slices in its ranks.

    folder: that of `write_api_key`; None: the server takes requests without a key.
    """
    values = {
        "--model-path": setup.model,
        "--dtype": setup.dtype,
        "--host": setup.host,
        "--port": setup.port,
        "--tp-size": setup.tensor_parallel,
        "--ep-size": setup.expert_parallel,
        "--context-length": setup.context_tokens + CONTEXT_MARGIN,
        "--max-running-requests": setup.max_running,
        "--random-seed": setup.seed,
        "--log-level": "warning",
        # Its watchdog takes a pause for a hang; `health.py` notices hangs.
        "--watchdog-timeout": setup.watchdog_timeout_s,
        # Each completion is one event at its end (and one at its first token).
        "--stream-interval": NEVER_STREAM_TOKENS,
    }
    if sglang_cpu.is_needed() or not setup.takes_all_memory:
        # Without it the cache is what SGLang's --mem-fraction-static leaves of a GPU.
        values["--max-total-tokens"] = setup.kv_tokens + CONTEXT_MARGIN
    if setup.nodes > 1:
        values |= {
            "--nnodes": setup.nodes,
            "--node-rank": setup.node_rank,
            "--dist-init-addr": setup.meets_at,
        }
    else:
        # SGLang's own choice would be any free port, perhaps that of another role.
        values["--nccl-port"] = setup.port + 1
    # In two words: SGLang 0.5.23 does not know `--config=FILE`.
    arguments = [] if folder is None else ["--config", str(folder / KEY_FILE)]
    arguments += [f"{flag}={value}" for flag, value in values.items()]
    arguments += [
        f"--weight-version={setup.version}",
        # Token ids go in and come out: neither tokenizer nor detokenizer runs, unless the
        # scheduler looks for strings.
        *([] if setup.stops_at_text else ["--skip-tokenizer-init"]),
        "--skip-server-warmup",
        *([] if setup.overlaps_schedule else ["--disable-overlap-schedule"]),
        f"--custom-weight-loader={loader}",
        *([f"--quantization={setup.quantization}"] if setup.quantization else []),
        *(["--enable-fp32-lm-head"] if setup.has_wide_head else []),
        *_family_flags(Path(setup.model), setup.quantization),
        *(["--enable-return-routed-experts"] if setup.returns_expert_choices else []),
    ]
    if setup.is_deterministic and not sglang_cpu.is_needed():
        # It allows no attention of the CPU, where our patches do the same.
        arguments.append("--enable-deterministic-inference")
    if setup.releases_memory and not sglang_cpu.is_needed():
        # Without CUDA SGLang has no memory saver, and accepts these calls.
        arguments.append("--enable-memory-saver")
    arguments += sglang_cpu.server_flags() if sglang_cpu.is_needed() else []
    return arguments + extra_flags(setup.extra_args)


def extra_flags(extra_args: Mapping[str, Argument | list[Argument]]) -> list[str]:
    """`generator.extra_args` as words of a command line."""
    words = []
    for name, value in extra_args.items():
        option = option_of(name)
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={value}")
    return words


def option_of(name: str) -> str:
    """Spelling of a key of `generator.extra_args` on a command line."""
    return "--" + name.replace("_", "-")


def server_environment(setup: EngineSetup, folder: Path | None = None) -> dict[str, str]:
    """Variables added to the server's environment.

    folder: new for this start; the ranks meet by a file in it. None, or an engine of several nodes:
    by a port, which listens on every interface.
    """
    shims: dict[str, str] = {}
    if folder is not None and setup.nodes == 1:
        # SGLang names shared memory of the ranks by the address, which it reads from a port alone.
        shims |= {
            MEETS_BY: f"file://{folder / RANKS_FILE}",
            "MASTER_ADDR": setup.host,
            "MASTER_PORT": str(setup.port + 1),
        }
    if sglang_cpu.is_needed():
        shims |= sglang_cpu.server_environment(setup.tensor_parallel)
        shims |= {DETERMINISTIC_VARIABLE: "1"} if setup.is_deterministic else {}
    shims |= _family_environment(Path(setup.model))
    if setup.colocate:
        # Free memory differs between its ranks, as the trainer's ranks hold unequal shares.
        shims["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if setup.may_exceed_model:
        shims["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return {**setup.env, **shims} | {
        # SGLang would permute experts again at every end of an update (0.5.23, unquant.py:936).
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",
        # With 1 its logprobs are those before the temperature (layers/sampler.py:321).
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
        ORDERS_VARIABLE: str(setup.orders or orders_path(setup.log_path)),
    }


def _family_flags(model: Path, quantization: str) -> list[str]:
    """What the server must be told of the model's family."""
    family, flags = _family_of(model), list[str]()
    if family is not None and family.wrapper is not None:
        # It looks for no processor of images then; its --language-model-only allows few models.
        flags.append('--json-model-override-args={"language_model_only": true}')
    if family is not None and family.experts is not None and family.experts.shared:
        # It would store the shared expert as one more routed expert, on CUDA alone.
        flags.append("--disable-shared-experts-fusion")
    if family is not None and _stores_in_order(family, model, quantization):
        # By its own choice experts may lie otherwise than slices say: up before gate and in blocks
        # (flashinfer_trtllm, on Blackwell), or transposed (triton_kernel, for gpt-oss).
        flags.append("--moe-runner-backend=triton")
    if family is not None and family.has_sinks and sglang_cpu.is_needed():
        # Its attention on the CPU reads the cache of a layer with a window by the slots of others.
        flags.append("--disable-hybrid-swa-memory")
    return flags


def _stores_in_order(family: Family, model: Path, quantization: str) -> bool:
    """Whether weight syncs write the experts. Folders of quantised weights are of frozen models."""
    if family.pairs_units or family.experts is None:
        return family.pairs_units
    has_codes = json.loads((model / "config.json").read_text()).get("quantization_config")
    return not has_codes and quantization in ("", "fp8")


def _family_environment(model: Path) -> dict[str, str]:
    """Variables that tell SGLang's processes which class the model is."""
    family = _family_of(model)
    if family is None:
        return {}
    values = {**family.defaults, **json.loads((model / "config.json").read_text())}
    if family.engine_class or (family.has_window and values.get("sliding_window")):
        # SGLang 0.5.23 has no window in the classes of these families.
        return {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "generation.text_models",
            FOLDER_VARIABLE: str(model.absolute()),
        }
    return sglang_cpu.family_environment(family.engine_module) if sglang_cpu.is_needed() else {}


def _family_of(model: Path) -> Family | None:
    """The table of the model's family; None for one that SGLang has to find itself."""
    is_folder = (model / "config.json").is_file()
    return FAMILIES.get(sglang_cpu.architecture_of(model)) if is_folder else None
