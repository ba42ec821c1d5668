"""What a table of a model family says. Pure data; needs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: names in Hugging Face files, keys of config.json."""

    block: str = "mlp"
    """Module of a layer that holds the router and the list `experts`."""
    projections: tuple[str, str, str] = PROJECTIONS
    """An expert's gate, up and down."""
    units_key: str = "moe_intermediate_size"
    """Key of the units of one expert."""
    normalises: bool | None = None
    """Whether the weights of a token's experts add up to 1; None: the key norm_topk_prob says."""
    count_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    """Keys of the number of experts; the first one that is there counts."""
    shared: str = ""
    """Module in the block of experts that see every token, as one MLP; "": there are none."""
    is_corrected: bool = False
    """Whether scores are sigmoids, and a float32 vector that is not trained corrects the choice.
    The key routed_scaling_factor then multiplies the weights of the chosen experts, and the first
    layers may have a dense MLP instead."""
    router: str = "gate"
    """Module of the block with the router's weight."""
    fused: str = ""
    """How files hold all experts of a layer in one tensor; "": they do not. "halves": the columns
    of all gates, then the columns of all ups. "pairs": each gate's column, then its up's; engines
    keep the pairs. See `folders/fused_experts.py`."""


@dataclass(frozen=True)
class Spelling:
    """How files name the tensors of a wrapped text model; see `rename`."""

    text: str
    """Prefix that stands for `model.` of the text model alone."""
    head: str = "lm_head.weight"

    def rename(self, name: str) -> str:
        """The name in files of a tensor that the text model alone calls `name`."""
        return self.head if name == "lm_head.weight" else self.text + name.removeprefix("model.")

    def plain(self, name: str) -> str | None:
        """The other way; None for a name of another spelling."""
        if name == self.head:
            return "lm_head.weight"
        return "model." + name.removeprefix(self.text) if name.startswith(self.text) else None


@dataclass(frozen=True)
class Wrapper:
    """A checkpoint that holds the text model among others, which are never trained."""

    text_types: tuple[str, ...]
    """Values of text_config.model_type that the family's table describes."""
    spellings: tuple[Spelling, ...]
    """transformers has renamed tensors, and folders of both kinds are about. Longer ones first."""
    carried: tuple[str, ...]
    """Name prefixes in files of tensors that are copied from the source to each export."""
    others: Mapping[str, "Family"] = field(default_factory=dict)
    """Other values of text_config.model_type -> the table of that text model alone."""

    def text_name(self, name: str) -> str | None:
        """The text model's own name of a tensor in a file; None for one that is carried."""
        if name.startswith(self.carried):
            return None
        plain = (spelling.plain(name) for spelling in self.spellings)
        return next((found for found in plain if found is not None), name)


PLAIN = Spelling("model.")
"""Files of a text model alone."""


@dataclass(frozen=True)
class Family:
    """Decoder-only transformers with RMSNorm, rotary embeddings and gated MLPs or experts."""

    architecture: str
    """The name in config.json's `architectures`."""
    engine_module: str
    """SGLang's module with its class."""
    engine_class: str = ""
    """The class there that `generation/text_models` makes the model of; "": the architecture's."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers 5 for keys missing in config.json that differ between families."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    qkv_bias_key: str = ""
    qk_norm_key: str = ""
    """Keys of config.json that decide instead of the two above."""
    has_biases: bool = False
    """Whether the output of attention, routers and experts have biases too."""
    has_sinks: bool = False
    """Whether a trained number of each head stands in the denominator of its softmax."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Values of rope_type that transformers takes for the family, of those that are implemented."""
    rotates_part: bool = False
    """Whether partial_rotary_factor counts; otherwise it must be 1."""
    has_fused_files: bool = False
    """Whether files have queries, keys and values in one tensor, and gate and up; see
    `fused_files.py`."""
    is_latent: bool = False
    """Whether attention is DeepSeek's: see `latent.py`."""
    predicts_ahead: bool = False
    """Whether files may hold more layers than the model has. They predict further tokens, are never
    trained, and are copied from the source to each export."""
    norms_all_heads: bool = False
    """Whether a norm of queries or keys is over all heads together, not over each."""
    norms_behind: bool = False
    """Whether norms follow attention and the MLP, with none before."""
    scales_queries: bool = False
    """Whether queries grow with their position: see `RopeScaling.query_beta`."""
    engine_keys: tuple[str, ...] = ()
    """Keys of config.json that SGLang needs, though transformers does not write them."""
    has_window: bool = False
    """Whether the key sliding_window holds for all layers; otherwise a window is refused."""
    mixes_windows: bool = False
    """Whether layer_types says for which layers the key sliding_window holds."""
    stretches_full_layers: bool = False
    """Whether rotary embeddings are stretched in layers without a window alone."""
    rotates_some: bool = False
    """Whether no_rope_layers says which layers have rotary embeddings (1) and which do not (0);
    without it each no_rope_layer_interval-th layer has none."""
    experts: Experts | None = None
    wrapper: Wrapper | None = None

    @property
    def fuses_experts(self) -> bool:
        """Whether it has experts, and files hold them so: see `Experts.fused`."""
        return self.experts is not None and bool(self.experts.fused)

    @property
    def pairs_units(self) -> bool:
        """Whether files and engines hold gates and ups in pairs: see `Experts.fused`."""
        return self.experts is not None and self.experts.fused == "pairs"

    def of_text(self, values: Mapping[str, Any]) -> "Family":
        """The table of the text model in a config.json: this one, or another inside the wrapper."""
        inner = values.get("text_config")
        if self.wrapper is None or not isinstance(inner, Mapping):
            return self
        return self.wrapper.others.get(inner.get("model_type", ""), self)
