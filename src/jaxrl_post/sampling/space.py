"""Which rows and pages are free, as the host counts them from the rows."""

import itertools
import operator
from collections.abc import Sequence

from jaxrl_post.sampling import pages, rows

_AGE = operator.attrgetter("age")


class Space:
  """What an engine's rows leave free, in each data-parallel part.

  Attributes:
    is_ample: whether there are pages for whatever the rows do.
  """

  def __init__(
    self,
    taken: Sequence[rows.Row | None],
    size: pages.Sizes,
    *,
    block: int,
    max_tokens: int,
  ) -> None:
    """Looks at rows that somebody else fills and empties.

    Args:
      taken: the rows of all parts; None is idle.
      size: of the cache.
      block: most tokens that a row makes at a time.
      max_tokens: longest completion.
    """
    self._rows, self._size = taken, size
    self._block, self._max_tokens = block, max_tokens
    # Nothing has to be counted where all rows have theirs at their longest.
    self.is_ample = (
      size.pages >= size.rows * size.row_pages
      and size.pool_pages >= size.rows * size.prompt_pages
    )

  def running(self) -> list[tuple[int, rows.Row]]:
    """Returns the rows that make tokens, with their places."""
    return [(i, r) for i, r in enumerate(self._rows) if r and not r.held]

  def held(self) -> list[tuple[int, rows.Row]]:
    """Returns the rows that have ended and stay in the cache."""
    return [(i, r) for i, r in enumerate(self._rows) if r and r.held]

  def by_request(self) -> list[tuple[int, rows.Row]]:
    """Returns `running` by age, those of one request side by side."""
    running = sorted(self.running(), key=lambda pair: pair[1].age)
    first: dict[int, int] = {}
    for _, row in running:
      first.setdefault(id(row.request), row.age)
    # The sort is stable: within a request it stays by age.
    return sorted(running, key=lambda pair: first[id(pair[1].request)])

  def due(self, idle: bool) -> list[int]:
    """Returns places of held rows that may be freed, the oldest first.

    Args:
      idle: whether nothing runs; then all may.
    """
    held = sorted(self.held(), key=lambda pair: pair[1].age)
    return [index for index, row in held if row.is_due or idle]

  def victim(self, part: int) -> rows.Row:
    """Returns the row of a part that waits for the others when pages end.

    What is only held goes first, the oldest of it; else the youngest.
    """
    here = self.taken(part)
    held = min((r for r in here if r.held), key=_AGE, default=None)
    return held or max(here, key=_AGE)

  def places(self, waiting: rows.Waiting) -> list[int]:
    """Returns idle rows for the next completions of a prompt, in one part.

    Args:
      waiting: the prompt, all of it read.

    Returns:
      As many as there are pages for, of those that can share the prompt.
    """
    width = self._size.group
    first = waiting.rows[0].member // width
    together = list(
      itertools.takewhile(lambda r: r.member // width == first, waiting.rows)
    )
    idle = [self._idle(part) for part in range(self._size.parts)]
    for part in sorted(range(self._size.parts), key=lambda p: -len(idle[p])):
      if self.is_ample:
        return idle[part][: len(together)]
      if self._prompt_need(waiting, part, first) > self.prompt_free(part):
        continue
      left, count = self.free(part) - self.need(part), 0
      for row in together[: len(idle[part])]:
        # One that was begun has to come back to where it was.
        left -= self._pages_of(
          min(len(row.tokens) + self._block, self._max_tokens)
        )
        count += left >= 0
      if count:
        return idle[part][:count]
    return []

  def taken(self, part: int) -> list[rows.Row]:
    """Returns the rows of a part that somebody has."""
    begin = part * self._size.rows
    here = self._rows[begin : begin + self._size.rows]
    return [row for row in here if row is not None]

  def free(self, part: int) -> int:
    """Returns the own pages that nobody has."""
    taken = sum(self._pages_of(row.used) for row in self.taken(part))
    return self._size.pages - taken

  def prompt_free(self, part: int) -> int:
    """Returns the pages for prompts that nobody has."""
    lengths = {r.tag: len(r.request.prompt) for r in self.taken(part)}
    taken = sum(self._pages_of(n - 1) for n in lengths.values())
    return self._size.pool_pages - taken

  def need(self, part: int) -> int:
    """Returns the pages that rows take in the next block."""
    need = 0
    for row in (row for row in self.taken(part) if not row.held):
      end = min(row.used + self._block, row.request.sampling.max_tokens)
      need += self._pages_of(end) - self._pages_of(row.used)
    return need

  def _idle(self, part: int) -> list[int]:
    begin = part * self._size.rows
    here = range(begin, begin + self._size.rows)
    return [i for i in here if self._rows[i] is None]

  def _pages_of(self, positions: int) -> int:
    return -(-positions // self._size.page)

  def _prompt_need(self, waiting: rows.Waiting, part: int, place: int) -> int:
    """Returns the pages for a prompt, 0 where rows of the part have it."""
    tag = waiting.tag_at(place)
    if any(row.tag == tag for row in self.taken(part)):
      return 0
    return self._pages_of(len(waiting.request.prompt) - 1)
