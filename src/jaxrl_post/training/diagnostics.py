"""Numbers that say how an update went; they change nothing.

Those of tokens are means over the trained tokens of the whole step, and add up
over its microbatches; largest ones are kept apart.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import losses, sequences

# Lags that are told apart; the last one stands for all from there on.
LAGS = (0, 1, 2, 3)
_BY_LAG = ("loss/importance_mean", "loss/clip_fraction")
_PULL, _TOKENS = "pull", "tokens"


def pulls_of(
  loss: Callable[[types.LossInputs], jax.Array], inputs: types.LossInputs
) -> Float[Array, "B T"]:
  """Says how hard a loss pulls at each token.

  Args:
    loss: of some rows.
    inputs: of the loss.

  Returns:
    The square of its gradient with respect to the token's log-probability; and
    to those of a teacher's candidates in its place, added up.
  """
  names = ["logprobs"]
  if inputs.candidate_logprobs is not None:
    names.append("candidate_logprobs")
  slopes = jax.grad(lambda x: loss(dataclasses.replace(inputs, **x)))(
    {name: jax.lax.stop_gradient(getattr(inputs, name)) for name in names}
  )
  found = jnp.square(slopes["logprobs"])
  if "candidate_logprobs" in slopes:
    found += jnp.sum(jnp.square(slopes["candidate_logprobs"]), axis=-1)
  return found


def of_tokens(
  inputs: types.LossInputs,
  shown: Mapping[str, jax.Array],
  pulls: Float[Array, "B T"],
) -> dict[str, jax.Array]:
  """Averages what the loss says of its tokens, together and by lag.

  Args:
    inputs: of the loss.
    shown: from the loss: numbers that add up, and [B, T] numbers of tokens.
    pulls: of each token, see `pulls_of`.

  Returns:
    Shares of the step's means; `lag/<k>/...` are not yet divided by the tokens
    of that lag, see `whole`.
  """
  scale = inputs.loss_mask / jnp.maximum(inputs.num_tokens, 1.0)

  def mean(x: jax.Array, where: jax.Array) -> jax.Array:
    keep = where * scale > 0
    return jnp.sum(jnp.where(keep, x * scale, 0.0))

  everywhere = jnp.ones_like(scale)
  found = {
    name: mean(x, everywhere) if x.ndim else x for name, x in shown.items()
  }
  for lag in LAGS:
    here = inputs.lag >= lag if lag == LAGS[-1] else inputs.lag == lag
    here = here.astype(jnp.float32)
    found[f"lag/{lag}/{_TOKENS}"] = mean(here, here)
    found[f"lag/{lag}/{_PULL}"] = mean(pulls, here)
    for name in _BY_LAG:
      if name in shown:
        key = f"lag/{lag}/{name.removeprefix('loss/')}"
        found[key] = mean(shown[name], here)
  return found


def mismatch(
  inputs: types.LossInputs,
  policy_versions: Int[Array, "B T"],
  version: Int[Array, ""],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Compares trainer and sampler on sequences whose sampled tokens have lag 0.

  Prompt and tokens of such a sequence saw the trainer's very weights, so that
  any difference is numerics.

  Returns:
    Sums over their trained tokens, and how many there are; and the largest.
  """
  # Older tokens that do not train count too: the engine may have kept keys and
  # values of older weights for them.
  older = (policy_versions >= 0) & (policy_versions != version)
  older = sequences.total(older.astype(jnp.float32), inputs.segment_ids)
  fresh = jnp.where(older == 0, inputs.loss_mask, 0.0)
  gap = losses.difference(inputs.old_logprobs, inputs.sampler_logprobs, fresh)
  sums = {
    "mismatch/mean_abs": jnp.sum(jnp.abs(gap)),
    "mismatch/kl": jnp.sum(jnp.expm1(gap) - gap),
    "mismatch/tokens": jnp.sum(fresh),
  }
  return sums, {"mismatch/max_abs": jnp.max(jnp.abs(gap))}


def whole(
  sums: Mapping[str, jax.Array], most: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  """Turns sums over a step into its metrics.

  Returns:
    Of `lag/<k>`: `tokens`, the share of trained tokens that have that lag (the
    last one: at least that); `pull`, their share in the squared gradient of the
    loss with respect to log-probabilities; other numbers are means over them,
    NaN where there are none. `loss/ess` is the effective sample size of the
    weights, as a share of the tokens. `mismatch/*` are means and the largest;
    NaN where there is no sequence of lag 0.
  """
  found = {k: x for k, x in sums.items() if not k.startswith(("lag/", "mis"))}
  if "loss/importance_squared" in found:
    square = found.pop("loss/importance_squared")
    mean = found["loss/importance_mean"]
    found["loss/ess"] = jnp.square(mean) / jnp.maximum(square, 1e-30)
  pull = sum(sums[f"lag/{lag}/{_PULL}"] for lag in LAGS)
  for key, x in sums.items():
    if not key.startswith("lag/"):
      continue
    lag, name = key.split("/")[1:]
    share = sums[f"lag/{lag}/{_TOKENS}"]
    if name == _TOKENS:
      found[key] = x
    elif name == _PULL:
      found[key] = x / jnp.maximum(pull, 1e-30)
    else:
      found[key] = jnp.where(
        share > 0, x / jnp.where(share > 0, share, 1), jnp.nan
      )
  count = sums["mismatch/tokens"]
  none = jnp.where(count > 0, 0.0, jnp.nan)
  for name in ("mismatch/mean_abs", "mismatch/kl"):
    found[name] = sums[name] / jnp.maximum(count, 1.0) + none
  return found | {name: x + none for name, x in most.items()}


def over_updates(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Puts the metrics of several updates of a batch together.

  Args:
    metrics: of each update, as a first dim.

  Returns:
    `loss/tokens` and `loss/bad_updates` added up, `mismatch/max_abs` the
    largest, `loss/skipped` 1 if all were skipped; of the rest the mean over
    updates that were applied and have a number.
  """
  done = metrics["loss/skipped"] == 0
  found = {}
  for name, x in metrics.items():
    if name in ("loss/tokens", "loss/bad_updates"):
      found[name] = jnp.sum(x)
    elif name == "loss/skipped":
      found[name] = jnp.min(x)
    elif name == "mismatch/max_abs":
      found[name] = jnp.nanmax(x)
    else:
      keep = done & jnp.isfinite(x)
      found[name] = jnp.sum(jnp.where(keep, x, 0.0)) / jnp.sum(
        keep.astype(jnp.float32)
      )
  return found
