"""What the blocks of an engine have done so far."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Tally:
  """Counts of an engine since it was made.

  Attributes:
    tokens: of completions that went through blocks.
    blocks: that were made.
    columns: of all blocks: passes through the model, each for a token of every
      row that had one to make.
    seconds: that they took.
  """

  tokens: int = 0
  blocks: int = 0
  columns: int = 0
  seconds: float = 0.0

  def add(self, made: Sequence[int]) -> None:
    """Counts a block.

    Args:
      made: tokens of each row in it.
    """
    self.tokens += sum(made)
    self.blocks += 1
    self.columns += max(made, default=0)

  def metrics(self) -> dict[str, float]:
    """Returns `engine/{decode_tokens,blocks,columns,decode_s}`."""
    return {
      "engine/decode_tokens": float(self.tokens),
      "engine/blocks": float(self.blocks),
      "engine/columns": float(self.columns),
      "engine/decode_s": self.seconds,
    }
