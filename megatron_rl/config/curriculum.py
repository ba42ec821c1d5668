"""The section `[curriculum]`: which train prompts are drawn at all, by how often they are solved.

Imported by every process, as part of the configuration tree.
"""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.section import Section


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
        """Whether it changes anything."""
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
