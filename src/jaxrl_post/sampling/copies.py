"""What devices have made for completions, on its way to the host."""

import functools

import jax
import numpy as np

from jaxrl_post.sampling import blocks


class Made:
  """A block on its way to the host."""

  def __init__(self, block: blocks.Block, version: int) -> None:
    """Begins the copy of what rows read later."""
    self.version = version
    arrays = (block.tokens, block.logprobs)
    # Most blocks have no most probable tokens to report.
    if block.top_ids.shape[2]:
      arrays += (block.top_ids, block.top_logprobs)
    self._valid, self._arrays = block.valid, arrays
    self._routing = block.routing
    for array in jax.tree.leaves((block.valid, arrays, block.routing)):
      array.copy_to_host_async()

  def read(self, index: int) -> tuple[list, ...]:
    """Returns what a row has made in it; waits for the copy.

    Returns:
      Tokens and their log-probabilities; then ids and log-probabilities of the
      most probable ones in each place, if there are any.
    """
    begin, end = self._places[index]
    return tuple(array[index][begin:end] for array in self._lists)

  def routing(self, index: int, count: int) -> np.ndarray | None:
    """Returns the experts of the first tokens that a row has read in it.

    Args:
      index: of the row.
      count: of its tokens.

    Returns:
      [count, L, X], not a view; None where nobody noted them.
    """
    if self._routing is None:
      return None
    return np.array(np.asarray(self._routing)[index, :count])

  @functools.cached_property
  def _lists(self) -> tuple[list, ...]:
    return tuple(x.tolist() for x in jax.device_get(self._arrays))

  @functools.cached_property
  def _places(self) -> list[tuple[int, int]]:
    """Returns where the tokens of each row begin and end: they are one run."""
    valid = np.asarray(self._valid)
    begin, count = valid.argmax(axis=1), valid.sum(axis=1)
    return list(zip(begin.tolist(), (begin + count).tolist(), strict=True))


class Scored:
  """Log-probabilities of a prompt on their way to the host."""

  def __init__(self, logprobs: jax.Array, source: int, length: int) -> None:
    """Begins the copy.

    Args:
      logprobs: of all prompts of a call, [P, T].
      source: which of them it is.
      length: tokens in it.
    """
    self._logprobs, self._source, self._length = logprobs, source, length
    logprobs.copy_to_host_async()

  def read(self) -> tuple[float, ...]:
    """Returns those of all tokens after the first; waits for the copy."""
    own = np.asarray(self._logprobs)[self._source, 1 : self._length]
    return tuple(own.tolist())


class Routing:
  """Experts of a prompt's tokens on their way to the host."""

  def __init__(self, routing: jax.Array, source: int, length: int) -> None:
    """Begins the copy.

    Args:
      routing: of all prompts of a call, [P, T, L, X].
      source: which of them it is.
      length: tokens in it.
    """
    self._routing, self._source, self._length = routing, source, length
    routing.copy_to_host_async()

  def read(self) -> np.ndarray:
    """Returns those of all tokens but the last; waits for the copy.

    The last token of a prompt is read again by each completion.
    """
    return np.asarray(self._routing)[self._source, : self._length - 1]
