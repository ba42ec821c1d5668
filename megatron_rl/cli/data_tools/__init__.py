"""`megatron-rl data TOOL`: tools on files of prompts and SFT examples; `megatron_rl/curation/` does
the work. A new tool is one line of the table and a module, or a function in one.

May import anything.
"""

from megatron_rl.cli.command_line.command import Entry, lazy_app

_MAKE, _CHOOSE, _CHECK = "Make", "Choose", "Check and translate"
TOOLS = tuple(
    Entry(name, f"megatron_rl.cli.data_tools.{module}", help_text, panel)
    for name, module, help_text, panel in (
        ("grade", "grade", "Sample and grade every problem by a model.", _MAKE),
        ("sft", "sft_examples", "Mine a run for SFT examples of a cold start.", _MAKE),
        ("difficulty", "choosing", "Keep prompts neither too hard nor too easy.", _CHOOSE),
        ("filter-format", "choosing", "Keep problems with one comparable answer.", _CHOOSE),
        ("dedupe", "choosing", "Drop near duplicates within a file.", _CHOOSE),
        ("decontaminate", "choosing", "Drop problems that evaluations ask.", _CHOOSE),
        ("check", "prompts", "Find faults of prompts, with their rows.", _CHECK),
        ("show", "prompts", "Show prompts as the model sees them.", _CHECK),
        ("code-tests", "choosing", "Validate tests by running solutions.", _CHECK),
        ("translate", "translating", "Translate a share of problems, six languages.", _CHECK),
    )
)
app = lazy_app("Make prompts and SFT examples.", TOOLS, add_completion=False)
