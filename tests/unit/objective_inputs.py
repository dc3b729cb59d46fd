"""Small inputs of a loss, and what an objective makes of them.

All are laid into rows of one shape, the rest of it off the mask and NaN: then
operations are compiled once, and nothing may read the rest.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.algos import objective as objectives
from jaxrl_post.algos import reducers

ROWS, WIDTH = 6, 6


def lay(x, like, fill=np.nan):
  """Lays numbers out in rows as wide as those of `like`, then pads."""
  x = np.broadcast_to(np.asarray(x, np.float32), np.shape(like))
  x = x[None] if x.ndim == 1 else x
  pads = ((0, ROWS - x.shape[0]), (0, WIDTH - x.shape[1]))
  return jnp.asarray(np.pad(x, pads, constant_values=fill))


def cut(x, like):
  """Takes away what `lay` put around; one row of one-dimensional numbers."""
  shape = (1, *np.shape(like))[-2:]
  return np.asarray(x)[: shape[0], : shape[1]]


def inputs(new, *, mask=1.0, segment_ids=None, reducer=None, **given):
  """Makes the inputs of a loss; each row is a sequence.

  Args:
    new: log-probabilities of a row, or of rows.
    mask: of them.
    segment_ids: of them; one a row if not given.
    reducer: gives the shares; the token mean if not given.
    **given: other fields, each as wide as `new` or of fewer dims.
  """
  mask = lay(mask, new, 0.0)
  ids = lay(1 if segment_ids is None else segment_ids, new, 0.0)
  sequence = jnp.broadcast_to(jnp.arange(ROWS)[:, None], mask.shape)
  reducer = reducer or reducers.TokenMean()
  fields = {
    "entropy": 0.0,
    "old_logprobs": new,
    "advantages": 1.0,
    "lag": 0.0,
    "reference_logprobs": 0.0,
    **given,
  }
  fields.setdefault("sampler_logprobs", fields["old_logprobs"])
  return types.LossInputs(
    logprobs=lay(new, new),
    loss_mask=mask,
    shares=reducer.shares(reducers.count(mask, sequence, jnp.arange(ROWS))),
    segment_ids=ids.astype(jnp.int32),
    num_tokens=jnp.sum(mask),
    **{name: lay(x, new) for name, x in fields.items()},
  )


def of(objective, new, **given):
  """Returns a loss, its gradient by `new`, and what it shows of tokens."""
  made = inputs(new, **given)

  def loss(new):
    return objective.loss(made.replace(logprobs=new))

  (value, shown), gradient = jax.value_and_grad(loss, has_aux=True)(
    made.logprobs
  )
  shown = {name: cut(x, new) for name, x in shown.items()}
  return value, cut(gradient, new), shown


def plain(**parts):
  """Makes an objective without a correction."""
  return objectives.Objective(**{"correction": None, **parts})
