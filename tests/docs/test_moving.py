"""docs/moving.md: the run in verl and the run here are the same, as the import has it."""

import re
from pathlib import Path

from megatron_rl.config.files import load_config
from tests.config.foreign.imported import imported, written

PAGE = Path(__file__).resolve().parents[2] / "docs/moving.md"
TITLE = "## The same run in verl and here\n"


def test_the_same_run_is_what_the_import_makes_of_it(tmp_path: Path) -> None:
    section = PAGE.read_text().split(TITLE)[1]
    [command] = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    [here] = re.findall(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    found, ours = imported(written(tmp_path, "run.sh", command))
    assert load_config(written(tmp_path, "here.toml", here)) == ours
    # The page names what the import leaves to check.
    named = set(re.findall(r"^- `([a-z_.]+)`:", section, re.MULTILINE))
    assert {line.partition(":")[0] for line in found.to_check} <= named
    assert len(found.to_check) == 2 and found.unknown == found.no_counterpart == {}
