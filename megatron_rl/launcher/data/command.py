"""`megatron-rl data TOOL`: the table of the tools. A new one is a line here and its own module."""

from megatron_rl.launcher.command_line.groups import Entry, lazy_app

_MAKE, _CHOOSE, _CHECK = "Make", "Choose", "Check and translate"
TOOLS = tuple(
    Entry(name, f"megatron_rl.launcher.{module}", help_text, panel)
    for name, module, help_text, panel in (
        ("grade", "evaluation.grade", "Samples of every problem by a model, graded.", _MAKE),
        ("sft", "data.sft_examples", "Mine a run for SFT examples of a cold start.", _MAKE),
        ("difficulty", "data.choosing", "Keep what is neither too hard nor easy.", _CHOOSE),
        ("filter-format", "data.choosing", "One comparable answer a problem.", _CHOOSE),
        ("dedupe", "data.duplicates", "Drop near duplicates within a file.", _CHOOSE),
        ("decontaminate", "data.duplicates", "Drop what evaluations ask.", _CHOOSE),
        ("check", "data.prompts", "Faults of prompts, with their rows.", _CHECK),
        ("show", "data.prompts", "Prompts as the model sees them.", _CHECK),
        ("code-tests", "data.code_tests", "Hold tests against solutions.", _CHECK),
        ("translate", "data.translating", "A share of the problems in six languages.", _CHECK),
    )
)
app = lazy_app("Make prompts and SFT examples.", TOOLS, add_completion=False)
