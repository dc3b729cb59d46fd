"""Completions of a model on disk, without a run: `sampling.load`."""

import contextlib
import dataclasses
import numbers
import os
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import quantize, transformer, weights
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import programs

# Settings of an engine that a run has other uses for, or `load` names itself.
_OTHERS = ("temperature", "in_flight", "max_tokens")


@types.host_record
class Sample:
  """A completion of one prompt.

  Attributes:
    prompt: the place of its prompt in the list.
    text: of all its tokens but special ones and the stop token.
    tokens: see `types.Completion`, likewise all that follow.
    logprobs: one a token.
    finish: what ended it.
    top_logprobs: empty if not asked for, as the next.
    prompt_logprobs: one a token of the prompt but for the first.
  """

  prompt: int
  text: str
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  finish: Literal["stop", "length"]
  top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
  prompt_logprobs: tuple[float, ...]


class Sampler:
  """A model, its tokenizer, and an engine; for one thread at a time.

  Attributes:
    tokenizer: of the model.
  """

  def __init__(
    self,
    policy: types.Policy,
    tokenizer: tokenizers.Tokenizer,
    steps: programs.Steps,
    cfg: engines.Sampling,
    *,
    mesh: jax.sharding.Mesh,
    max_prompt: int,
    vocab_size: int,
    key: jax.Array,
  ) -> None:
    """Takes what `load` has made; nothing is compiled yet."""
    self.tokenizer = tokenizer
    self._policy, self._cfg = policy, cfg
    self._max_prompt, self._vocab_size = max_prompt, vocab_size
    self._make = generator.build(
      steps,
      mesh,
      cfg=cfg,
      max_prompt=max_prompt,
      vocab_size=vocab_size,
      lock=contextlib.nullcontext(),
      decode=tokenizer.decode,
    )
    self._key = key
    self._engine = self._make(key)
    self._next = 0

  def generate(
    self, prompts: Sequence[Any], *, n: int = 1, **sampling: Any
  ) -> list[Sample]:
    """Completes every prompt.

    Args:
      prompts: any number of them, each of its own kind. Text is given to the
        model as it stands, behind its begin token if it has one. A list of
        messages, with `role` and `content`, goes through its chat template. A
        list of ids is taken as it is.
      n: completions of each.
      **sampling: fields of `types.SamplingParams`. Without them `max_tokens` is
        that of the engine, and `stop_ids` are the tokenizer's.

    Returns:
      n samples a prompt, in the order of the prompts. Two calls differ, unless
      `seed` is given or both are the first ones of samplers loaded alike.

    Raises:
      InputError: names the argument that is wrong, or the prompt that does not
        fit. Nothing is sampled then.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
      raise types.InputError(
        f"prompts: expected a list of prompts, got {prompts!r}. Put the prompt "
        "into a list."
      )
    _check_count("n", n, "1 is one completion a prompt.")
    asked = self._asked(sampling)
    requests = []
    for index, prompt in enumerate(prompts):
      first = self._next + index * n
      request = types.Request(
        prompt=self._ids(index, prompt),
        uids=tuple(uid % 2**32 for uid in range(first, first + n)),
        sampling=asked,
      )
      self._engine.check(request)
      requests.append(request)
    self._next += len(prompts) * n
    try:
      made = engines.generate(self._engine, self._policy, requests)
    except BaseException:  # Also Ctrl-C: what is half made is nobody's.
      self._engine = self._make(self._key)
      raise
    return [self._sample(i // n, c, asked) for i, c in enumerate(made)]

  def _asked(self, given: Mapping[str, Any]) -> types.SamplingParams:
    fields = _checked(given, types.SamplingParams, ())
    defaults = {
      "max_tokens": self._cfg.max_tokens,
      "stop_ids": self.tokenizer.eos_ids,
    }
    return types.SamplingParams(**(defaults | fields))

  def _ids(self, index: int, prompt: Any) -> tuple[int, ...]:
    """Returns the ids of a prompt, or refuses it."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if isinstance(prompt, str):
      ids, _ = self.tokenizer.prompt_ids(prompt)
    elif is_list and prompt and all(isinstance(x, Mapping) for x in prompt):
      ids, _ = self.tokenizer.prompt_ids(tuple(prompt))
    elif is_list and all(_fits(x, int) for x in prompt):
      ids = tuple(int(x) for x in prompt)
    else:
      raise types.InputError(
        f"prompt {index}: expected text, token ids or messages, got "
        f"{prompt!r}. Correct it."
      )
    wrong = [i for i in ids if not 0 <= i < self._vocab_size]
    if wrong:
      raise types.InputError(
        f"prompt {index}: expected ids in [0, {self._vocab_size}), got "
        f"{wrong[0]}. Use the tokenizer of the model."
      )
    if not 1 <= len(ids) <= self._max_prompt:
      raise types.InputError(
        f"prompt {index}: expected 1 to {self._max_prompt} tokens, got "
        f"{len(ids)}. Shorten it, or raise max_prompt."
      )
    return ids

  def _sample(
    self, prompt: int, made: types.Completion, asked: types.SamplingParams
  ) -> Sample:
    stopped = made.tokens[-1] in asked.stop_ids
    tokens = made.tokens[:-1] if stopped else made.tokens
    return Sample(
      prompt=prompt,
      text=self.tokenizer.decode(tokens),
      tokens=made.tokens,
      logprobs=made.logprobs,
      finish=made.finish,
      top_logprobs=made.top_logprobs,
      prompt_logprobs=made.prompt_logprobs,
    )


def load(
  path: str | os.PathLike[str],
  *,
  max_prompt: int = 512,
  max_tokens: int = 128,
  group: int = 4,
  data: int = 1,
  tensor: int = 1,
  seed: int = 0,
  **settings: Any,
) -> Sampler:
  """Loads a model to sample from it.

  Args:
    path: a Hugging Face folder with safetensors, or a GGUF file.
    max_prompt: longest prompt, in tokens.
    max_tokens: longest completion.
    group: most completions of a prompt that have it in the cache together. More
      share it once in so many of them; fewer read it for all the same.
    data: copies of the weights, each on devices of its own with its own rows.
    tensor: devices that a copy is split over.
    seed: of everything that is sampled.
    **settings: fields of `sampling.engine.Sampling`: `rows`, `dtype`, `block`,
      `page`, `cache`, `prefill_tokens`, `top_logprobs`.

  Returns:
    The sampler, with weights on the first data * tensor devices.

  Raises:
    InputError: a file is missing or not supported, or a size does not fit model
      or devices.
  """
  path = os.fspath(path)
  sizes = _checked(settings, engines.Sampling, _OTHERS)
  own = {
    "max_prompt": max_prompt,
    "max_tokens": max_tokens,
    "group": group,
    "data": data,
    "tensor": tensor,
  }
  for name, value in own.items():
    _check_count(name, value, "Correct it.")
  if not _fits(seed, int) or not 0 <= seed < 2**32:
    raise types.InputError(
      f"seed: expected a whole number in [0, 2**32), got {seed!r}. 0 is usual."
    )
  cfg = engines.Sampling(max_tokens=max_tokens, **sizes)
  shape = weights.read_config(path)
  if max_prompt + max_tokens > shape.max_positions:
    raise types.InputError(
      f"max_prompt + max_tokens: expected at most {shape.max_positions} "
      f"positions of the model, got {max_prompt + max_tokens}. Lower one of "
      "them."
    )
  if cfg.top_logprobs > shape.vocab_size:
    raise types.InputError(
      f"top_logprobs: expected at most the {shape.vocab_size} ids of the "
      f"model, got {cfg.top_logprobs}. Lower it."
    )
  tokenizer = tokenizers.load(path)
  tokenizers.check_vocab(tokenizer, shape.vocab_size)
  mesh = _mesh(data, tensor, cfg.rows)
  params, rules = _params(path, shape, cfg, mesh)
  steps = generator.compiled(
    mesh,
    rules=rules,
    decoder=decoders.Decoder(shape, dtype=cfg.compute),
    cfg=cfg,
    max_prompt=max_prompt,
    group=min(group, cfg.rows // data),
  )
  return Sampler(
    types.Policy(params=params, version=0, step=0),
    tokenizer,
    steps,
    cfg,
    mesh=mesh,
    max_prompt=max_prompt,
    vocab_size=shape.vocab_size,
    key=generator.keys(seed)[0],
  )


def _mesh(data: int, tensor: int, rows: int) -> jax.sharding.Mesh:
  devices, count = jax.local_devices(), data * tensor
  if count > len(devices):
    raise types.InputError(
      f"data x tensor: expected at most the {len(devices)} devices of this "
      f"process, got {data} x {tensor} = {count}. Lower one of them."
    )
  if rows % data:
    raise types.InputError(
      f"rows: expected a multiple of data={data}, got {rows}. Change it."
    )
  axes = meshes.GenerationAxes(data=data, tensor=tensor)
  return meshes.build(axes, devices[:count])


def _params(
  path: str,
  shape: transformer.Config,
  cfg: engines.Sampling,
  mesh: jax.sharding.Mesh,
) -> tuple[types.Tree, dict[str, str]]:
  """Reads weights as the engine holds them; returns their rules as well."""
  spec = transformer.spec(shape)
  held = quantize.spec(spec) if cfg.quantized else spec
  rules, _ = meshes.fit_rules(held, meshes.GENERATION_RULES, mesh)
  home = meshes.weight_shardings(spec, rules, mesh)
  if not cfg.quantized:
    return weights.read_params(path, shape, home, cfg.compute), rules

  def shrink(params: types.Tree) -> types.Tree:
    return jax.tree.map(
      lambda x: x if quantize.is_int8(x) else x.astype(cfg.compute),
      quantize.quantize(spec, params),
      is_leaf=quantize.is_int8,
    )

  away = meshes.weight_shardings(held, rules, mesh)
  whole = weights.read_params(path, shape, home, "float32")
  return jax.jit(shrink, out_shardings=away)(whole), rules


def _checked(
  given: Mapping[str, Any], cls: type[Any], others: Sequence[str]
) -> dict[str, Any]:
  """Returns fields of a class, lists as tuples.

  Args:
    given: what a caller gave.
    cls: a dataclass.
    others: fields that are not for callers.

  Raises:
    InputError: a name that the class does not have, or a value of another type.
  """
  hints = typing.get_type_hints(cls)
  names = [f.name for f in dataclasses.fields(cls) if f.name not in others]
  for name, value in given.items():
    if name not in names:
      raise types.InputError(
        f"{name}: expected one of {', '.join(names)}, got another name. "
        "Correct it."
      )
    hint = hints[name]
    if not _fits(value, hint):
      kind = hint.__name__ if isinstance(hint, type) else hint
      if typing.get_origin(hint) is Literal:
        kind = f"one of {', '.join(typing.get_args(hint))}"
      raise types.InputError(
        f"{name}: expected {kind}, got {value!r}. Correct the value."
      )
  return {name: _frozen(value) for name, value in given.items()}


def _check_count(name: str, value: Any, advice: str) -> None:
  if not _fits(value, int) or value < 1:
    raise types.InputError(
      f"{name}: expected a whole number >= 1, got {value!r}. {advice}"
    )


def _fits(value: Any, hint: Any) -> bool:
  """Says whether a value is of a type; a list will do for a tuple."""
  args = typing.get_args(hint)
  if hint in (int, float):
    kind = numbers.Integral if hint is int else numbers.Real
    return isinstance(value, kind) and not isinstance(value, bool)
  if typing.get_origin(hint) is Literal:
    return value in args
  if typing.get_origin(hint) is tuple:
    if not isinstance(value, list | tuple):
      return False
    kinds = (args[0],) * len(value) if args[-1] is ... else args
    same = len(kinds) == len(value)
    return same and all(map(_fits, value, kinds))
  if type(None) in args:
    return value is None or _fits(value, args[0])
  return isinstance(value, hint)


def _frozen(value: Any) -> Any:
  """Returns lists as tuples, whatever is in them."""
  if not isinstance(value, list | tuple):
    return value
  return tuple(_frozen(x) for x in value)
