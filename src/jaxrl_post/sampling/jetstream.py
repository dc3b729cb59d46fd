"""The engine behind JetStream's own interface.

`Engine` is a `jetstream.engine.engine_api.Engine` of google-jetstream 0.2.2,
over the pure steps: a slot is a group, a block of tokens comes out of each
`generate`, and weights are those of the call. JetStream is looked for when an
`Engine` is made, not before.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.sampling import (
  blocks,
  jetstream_package,
  programs,
  reader,
  steps,
)
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import prefix as prefixes

# What JetStream pads prompts to; the largest prompt is one of them.
BUCKETS = tuple(2**n for n in range(4, 16))

# Stands for the begin token, which JetStream puts in front of every prompt,
# where the model has none.
_NO_BOS = -1


@functools.cache
def load() -> jetstream_package.Package:
  """Imports JetStream, see `jetstream_package.load`.

  Returns:
    The modules. `Engine` and `Tokenizer` count as JetStream's from now on.

  Raises:
    InputError: it is not installed, or in another version.
  """
  package = jetstream_package.load()
  package.engine_api.Engine.register(Engine)
  package.tokenizer_api.Tokenizer.register(Tokenizer)
  return package


class Tokenizer:
  """A model's own tokenizer as a `jetstream.engine.tokenizer_api.Tokenizer`."""

  def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
    """Wraps a tokenizer of `data.tokenizer`."""
    self._tokenizer = tokenizer
    self._pad = load().token_utils.pad_tokens

  def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
    """Turns text into padded ids.

    Args:
      s: a prompt.
      **kwargs: JetStream's `is_bos`, False to leave the begin token out, and
        how it pads: `prefill_lengths`, `max_prefill_length`, `jax_padding`.

    Returns:
      Ids, [bucket], and how many are the prompt's.

    Raises:
      InputError: no token, or a character that has none.
    """
    if kwargs.pop("is_bos", True):
      ids, _ = self._tokenizer.prompt_ids(s)
    else:
      ids = self._tokenizer.encode(s)
    return self._pad(
      np.array(ids, np.int32), self.bos_id, self.pad_id, is_bos=False, **kwargs
    )

  def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
    """Turns ids into text, special tokens left out."""
    del kwargs  # `is_streaming` is for SentencePiece.
    return self._tokenizer.decode(token_ids)

  @property
  def pad_id(self) -> int:
    """What prompts are padded with."""
    return self._tokenizer.pad_id

  @property
  def eos_id(self) -> int:
    """The first of the tokens that end a completion."""
    return self._tokenizer.eos_ids[0]

  @property
  def bos_id(self) -> int:
    """The begin token; -1, which `Engine.prefill` leaves out, without one."""
    bos_id = self._tokenizer.bos_id
    return _NO_BOS if bos_id is None else bos_id

  @property
  def stop_tokens(self) -> set[int]:
    """All tokens that end a completion; padding is not one of them."""
    return set(self._tokenizer.eos_ids)


@types.record
class Decoding:
  """The engine between two calls of `generate`.

  Attributes:
    state: of the steps.
    inserted: prompts inserted so far; the uids of the next group follow it.
  """

  state: steps.DecodeState
  inserted: int


class Engine:
  """The pure steps as a `jetstream.engine.engine_api.Engine`.

  A slot is a group: `samples_per_slot` completions of one prompt, which is
  prefilled once. The n-th prompt that is inserted has the uids n * group_size
  and following, whatever its slot, so `engine.Engine` with the same key, uids
  and weights makes the same completions.
  """

  def __init__(
    self,
    compiled: programs.Steps,
    cfg: engines.Sampling,
    *,
    params: types.Tree,
    tokenizer: tokenizers.Tokenizer,
    vocab_size: int,
    sampling: types.SamplingParams,
    group_size: int,
    max_prompt: int,
    key: jax.Array,
    mesh: jax.sharding.Mesh,
    dispatch: contextlib.AbstractContextManager[Any],
  ) -> None:
    """Makes an engine; memory is taken by `init_decode_state`.

    Args:
      compiled: the steps, of the sizes in `cfg` and `max_prompt`.
      cfg: sizes.
      params: what `load_params` returns: weights in the engine's dtype.
      tokenizer: of the model.
      vocab_size: ids must be below it.
      sampling: how every completion is sampled; JetStream's requests have no
        say in it, and only cut completions shorter.
      group_size: completions of each prompt.
      max_prompt: longest prompt, in tokens.
      key: the random key of all completions.
      mesh: that the weights are on.
      dispatch: held around every launch: JetStream prefills and decodes in
        threads of their own, which must launch in one order.

    Raises:
      InputError: JetStream is not there, or sizes do not fit it.
    """
    check(cfg, group_size, max_prompt)
    self._package = load()
    self._steps = compiled
    self._cfg = cfg
    self._params = params
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._sampling = sampling
    self._group_size = group_size
    self._buckets = reader.buckets(max_prompt)
    self._mesh = mesh
    self._whole = jax.sharding.NamedSharding(mesh, jax.P())
    self._key = jax.device_put(key, self._whole)
    self._dispatch = dispatch
    self._weights = programs.LaidOut(compiled.layout)
    self._columns = jax.jit(_columns, out_shardings=self._whole)

  def check_prompt(self, ids: Sequence[int]) -> None:
    """Refuses a prompt that `prefill` cannot take.

    Args:
      ids: begin token included.

    Raises:
      InputError: too long, empty, or a token that the model does not have.
    """
    self._check_length(len(ids))
    wrong = [i for i in ids if not 0 <= i < self._vocab_size]
    if wrong:
      raise types.InputError(
        f"prompt: expected ids in [0, {self._vocab_size}), got {wrong[0]}. Use "
        "the tokenizer of the model."
      )

  def _check_length(self, length: int) -> None:
    most = self._buckets[-1]
    if not 1 <= length <= most:
      raise types.InputError(
        f"prompt: expected 1 to {most} tokens, begin token included, got "
        f"{length}. Send a prompt of another length, or raise data.max_prompt "
        "of the server."
      )

  def prefill(
    self,
    *,
    params: types.Tree,
    existing_prefix: prefixes.Prefix | None = None,
    padded_tokens: Any,
    true_length: int,
  ) -> prefixes.Prefix:
    """Computes the keys and values of a prompt.

    Args:
      params: weights, in the engine's dtype.
      existing_prefix: None; a prompt is read in one go.
      padded_tokens: ids, [bucket]; a first one of -1 is left out.
      true_length: how many of them are the prompt's.

    Returns:
      The prefix of one prompt.

    Raises:
      InputError: a prefix, or a prompt that `check_prompt` refuses. JetStream's
        driver answers that by ending the process: check prompts before.
    """
    if existing_prefix is not None:
      raise types.InputError(
        "existing_prefix: expected none, got one. Prefill the whole prompt."
      )
    ids = np.asarray(padded_tokens, np.int32)
    if true_length > len(ids):  # JetStream has cut it.
      self._check_length(max(true_length, self._buckets[-1] + 1))
    ids = ids[:true_length]
    if ids[:1].tolist() == [_NO_BOS]:
      ids = ids[1:]
    self.check_prompt(ids.tolist())
    return self._prefill(params, ids)

  def _prefill(self, params: types.Tree, ids: np.ndarray) -> prefixes.Prefix:
    bucket = next(b for b in self._buckets if b >= len(ids))
    tokens = np.zeros((1, bucket), np.int32)
    tokens[0, : len(ids)] = ids
    with self._dispatch:
      return self._steps.prefill(
        params, tokens, np.array([len(ids)], np.int32), bucket
      )

  def insert(
    self, prefix: prefixes.Prefix, decode_state: Decoding, slot: int
  ) -> Decoding:
    """Starts the group of a prompt in a slot, whatever was in it.

    Args:
      prefix: from `prefill`.
      decode_state: donated.
      slot: in [0, max_concurrent_decodes).

    Returns:
      The state with that group in it, the others as they were.
    """
    first = decode_state.inserted * self._group_size
    uids = [(first + i) % 2**32 for i in range(self._group_size)]
    rows = steps.rows_for(
      uids,
      self._sampling,
      num_forced=self._cfg.max_tokens,
      tag=decode_state.inserted % (2**32 - 1) + 1,
    )
    begin = slot * self._group_size
    at = np.arange(begin, begin + self._group_size, dtype=np.int32)[None]
    source = np.zeros(1, np.int32)
    with self._dispatch:
      state = self._steps.insert(prefix, decode_state.state, source, at, rows)
    return Decoding(state=state, inserted=decode_state.inserted + 1)

  def generate(
    self, params: types.Tree, decode_state: Decoding
  ) -> tuple[Decoding, Any]:
    """Makes a block of tokens in every slot.

    Args:
      params: weights; those of the call before need not be these.
      decode_state: donated.

    Returns:
      The state after the block, and a `ResultTokens`: tokens, whether each is
      valid, and the tokens made before the block, plus 1. A stop token is
      valid; what follows it is not.
    """
    with self._dispatch:
      state, block = self._steps.decode(
        self._weights.of(params), decode_state.state, self._key
      )
      data = self._columns(block, state.rows.made)
    width = block.tokens.shape[1]
    results = self._package.engine_api.ResultTokens(
      data=data,
      tokens_idx=(0, width),
      valid_idx=(width, 2 * width),
      length_idx=(2 * width, 2 * width + 1),
      samples_per_slot=self._group_size,
    )
    return Decoding(state=state, inserted=decode_state.inserted), results

  def load_params(self, *args: Any, **kwargs: Any) -> types.Tree:
    """Returns the weights that the engine was made with."""
    del args, kwargs
    return self._params

  def init_decode_state(self, *args: Any, **kwargs: Any) -> Decoding:
    """Returns a state with nothing in it; its memory is taken now."""
    del args, kwargs
    with self._dispatch:
      return Decoding(state=self._steps.empty(), inserted=0)

  def warm_up(self) -> None:
    """Compiles every program that the engine will run."""
    decoding = self.init_decode_state()
    for bucket in self._buckets:
      prefix = self._prefill(self._params, np.zeros(bucket, np.int32))
      decoding = self.insert(prefix, decoding, 0)
    _, results = self.generate(self._params, decoding)
    jax.block_until_ready(results.data)

  def get_prefix_destination_sharding(self) -> Any:
    """Returns where a prefix of another engine has to be put."""
    return self._whole

  def get_tokenizer(self) -> Any:
    """Returns an empty description: the tokenizer is the engine's own."""
    return self._package.tokenizer_pb2.TokenizerParameters()

  def build_tokenizer(self, metadata: Any) -> Tokenizer:
    """Returns the tokenizer of the model."""
    del metadata
    return Tokenizer(self._tokenizer)

  @property
  def max_concurrent_decodes(self) -> int:
    """Slots: groups in flight at a time."""
    return self._cfg.rows // self._group_size

  @property
  def samples_per_slot(self) -> int:
    """Completions of each prompt."""
    return self._group_size

  @property
  def max_prefill_length(self) -> int:
    """The bucket of JetStream that holds the longest prompt."""
    return next(b for b in BUCKETS if b > self._buckets[-1])

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """Where the weights are."""
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    """None: nothing of the engine runs on them."""
    return None


def check(cfg: engines.Sampling, group_size: int, max_prompt: int) -> None:
  """Refuses sizes that JetStream cannot serve.

  Args:
    cfg: sizes of the engine.
    group_size: completions of each prompt.
    max_prompt: longest prompt, in tokens.

  Raises:
    InputError: names the setting.
  """
  most = BUCKETS[-1] - 1  # One is for the begin token.
  rules = (
    (
      cfg.rows >= group_size,
      "sampling.rows",
      f"at least the {group_size} of group_size",
      cfg.rows,
    ),
    (max_prompt <= most, "data.max_prompt", f"at most {most}", max_prompt),
    # JetStream never waits for pages: all slots must have theirs.
    (cfg.cache == 1, "sampling.cache", "1", cfg.cache),
  )
  for holds, name, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule} to serve with JetStream, got {value}. Change "
        "it."
      )


def _columns(
  block: blocks.Block, made: Int[Array, " B"]
) -> Int[Array, "B columns"]:
  """Puts a block into one array, as JetStream reads it."""
  valid = block.valid.astype(jnp.int32)
  # JetStream drops the block of a completion that has more than its limit. Of
  # what was made before it, plus 1, so that the last block is not lost.
  lengths = made - valid.sum(axis=1) + 1
  return jnp.concatenate([block.tokens, valid, lengths[:, None]], axis=1)
