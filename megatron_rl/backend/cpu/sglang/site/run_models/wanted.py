"""SGLang's module of the family that the environment names."""

import importlib
import os

_FAMILY = os.environ["MEGATRON_RL_MODEL_FAMILY"]
EntryClass = importlib.import_module(f"sglang.srt.models.{_FAMILY}").EntryClass
