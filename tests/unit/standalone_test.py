"""A model from a folder, sampled without a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import sampling, types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import weights
from jaxrl_post.sampling import engine as engines
from tests.reference import tiny_folder

_SIZES = {
  "max_prompt": 48,
  "max_tokens": 12,
  "rows": 4,
  "block": 4,
  "prefill_tokens": 48,
  "top_logprobs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("model")
  tiny_folder.write(path, "qwen2")  # Its probabilities are far from 1.
  return path


@pytest.fixture(scope="module")
def sampler(folder):
  return sampling.load(folder, **_SIZES)


def test_samples_are_in_the_order_of_the_prompts_and_say_what_was_made(
  folder, sampler
):
  prompts = ["6 x 7?", "a longer one, read in chunks of its own", "é"]
  made = sampler.generate(prompts, n=3, temperature=0.8, top_logprobs=1)
  assert [s.prompt for s in made] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
  config = weights.read_config(str(folder))
  params = weights.read_params(str(folder), config)
  tokenizer = tokenizers.load(str(folder))
  for sample in made:
    prompt, _ = tokenizer.prompt_ids(prompts[sample.prompt])
    ids = jnp.array([[*prompt, *sample.tokens]])
    logprobs, _ = decoders.logprobs(
      decoders.Decoder(config),
      params,
      tokens=ids,
      positions=jnp.arange(ids.shape[1])[None],
      segment_ids=jnp.ones_like(ids),
      temperature=jnp.full(ids.shape, 0.8),
    )
    np.testing.assert_allclose(
      sample.logprobs, logprobs[0, len(prompt) :], atol=1e-4
    )
    assert sample.text == tokenizer.decode(sample.tokens)
    assert len(sample.top_logprobs) == len(sample.tokens)
    stopped = sample.tokens[-1] in tokenizer.eos_ids
    assert sample.finish == ("stop" if stopped else "length")
    assert stopped or len(sample.tokens) == 12


def test_text_ids_and_messages_are_prompts(sampler):
  words = "How are you?"
  messages = [{"role": "user", "content": words}]
  rendered, _ = sampler.tokenizer.prompt_ids(tuple(messages))
  asked = [words, sampler.tokenizer.encode(words), messages, list(rendered)]
  a, b, c, d = sampler.generate(asked, temperature=0.0, prompt_logprobs=True)
  assert (a.tokens, a.prompt_logprobs) == (b.tokens, b.prompt_logprobs)
  assert (c.tokens, c.prompt_logprobs) == (d.tokens, d.prompt_logprobs)
  assert len(a.prompt_logprobs) == len(words) - 1
  assert len(c.prompt_logprobs) == len(rendered) - 1


def test_more_prompts_than_rows_flow_through(sampler):
  prompts = [f"number {i}" for i in range(10)]
  together = sampler.generate(prompts, temperature=0.0, max_tokens=5)
  alone = [
    sampler.generate([p], temperature=0.0, max_tokens=5)[0] for p in prompts
  ]
  assert [s.text for s in together] == [s.text for s in alone]
  assert sampler.generate([]) == []


def test_the_seed_decides_and_calls_differ(folder, sampler):
  ask = dict(n=2, max_tokens=8)
  again, twin = (sampling.load(folder, **_SIZES, seed=3) for _ in range(2))
  first = again.generate(["x"], **ask)
  assert first == twin.generate(["x"], **ask)
  assert first != sampler.generate(["x"], **ask)
  assert first != again.generate(["x"], **ask)
  seeded = again.generate(["x"], seed=9, **ask)
  assert seeded == sampler.generate(["x"], seed=9, **ask)
  assert seeded[0].tokens != seeded[1].tokens


def test_fields_of_a_request_are_arguments(sampler):
  (free,) = sampler.generate(["abc"], seed=1, stop_ids=())
  assert (free.finish, len(free.tokens)) == ("length", 12)
  (short,) = sampler.generate(["abc"], seed=1, stop_ids=(), max_tokens=3)
  assert short.tokens == free.tokens[:3]
  ids = [free.tokens[4]]
  (ended,) = sampler.generate(["abc"], seed=1, stop_ids=ids)
  place = free.tokens.index(ids[0])
  assert ended.tokens == free.tokens[: place + 1]
  assert ended.text == sampler.tokenizer.decode(free.tokens[:place])
  token = sampler.tokenizer.encode("q")[0]
  (stopped,) = sampler.generate(
    ["abc"], stop_strings=["qqq"], logit_bias=[(token, 1e9)]
  )
  assert (stopped.text, stopped.finish) == ("qqq", "stop")
  assert stopped.tokens == (token,) * 3


def test_a_mesh_makes_the_same_tokens(folder, sampler):
  prompts = ["one", "two", "three"]
  spread = sampling.load(folder, **_SIZES, data=2, tensor=2, group=1)
  assert len(spread._policy.params["embed"].sharding.device_set) == 4
  expected = sampler.generate(prompts, n=2, seed=5)
  found = spread.generate(prompts, n=2, seed=5)
  for a, b in zip(expected, found, strict=True):
    assert a.tokens == b.tokens
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_weights_in_8_bits_are_near_those_of_the_file(folder, sampler):
  (exact,) = sampler.generate(["abc"], temperature=0.0, prompt_logprobs=True)
  sizes = _SIZES | {"max_tokens": 4}
  small = sampling.load(folder, **sizes, dtype="int8")
  assert small._policy.params["layers"]["q"].values.dtype == "int8"
  assert small._policy.params["embed"].dtype == "bfloat16"
  (near,) = small.generate(["abc"], temperature=0.0, prompt_logprobs=True)
  gap = np.subtract(near.prompt_logprobs, exact.prompt_logprobs)
  assert 0 < np.abs(gap).max() < 0.5


def test_what_breaks_off_leaves_nothing_behind(sampler, monkeypatch):
  (expected,) = sampler.generate(["abc"], seed=1)
  plain = engines.Engine.step

  def broken(engine, params, version):
    plain(engine, params, version)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(engines.Engine, "step", broken)
    with pytest.raises(KeyboardInterrupt):
      sampler.generate(["abc", "d"], n=3)
  assert sampler.generate(["abc"], seed=1) == [expected]


@pytest.mark.parametrize(
  ("prompts", "given", "expected"),
  [
    ("text", {}, "prompts: expected a list of prompts, got 'text'"),
    ([5], {}, "prompt 0: expected text, token ids or messages, got 5"),
    ([[5, "a"]], {}, "prompt 0: expected text, token ids or messages"),
    (["a", [264]], {}, r"prompt 1: expected ids in \[0, 264\), got 264"),
    ([[-1]], {}, r"prompt 0: expected ids in \[0, 264\), got -1"),
    (["a", "b" * 49], {}, "prompt 1: expected 1 to 48 tokens, got 49"),
    ([[]], {}, "prompt 0: expected 1 to 48 tokens, got 0"),
    ([""], {}, "prompt: expected at least one token"),
    ([[{"role": "user"}]], {}, "messages with role and content"),
    (["a"], {"n": 0}, "n: expected a whole number >= 1, got 0"),
    (["a"], {"heat": 1}, "heat: expected one of temperature, top_k"),
    (["a"], {"temperature": "hot"}, "temperature: expected float"),
    (["a"], {"temperature": -1}, r"temperature: expected in \[0, 1e\+06\]"),
    (["a"], {"max_tokens": 2.5}, "max_tokens: expected int, got 2.5"),
    (["a"], {"max_tokens": 13}, "max_tokens of at most 12, got 13"),
    (["a"], {"top_logprobs": 3}, "top_logprobs of at most 2, got 3"),
    (["a"], {"stop_strings": "end"}, "stop_strings: expected .*tuple"),
    (["a"], {"stop_strings": [1]}, r"stop_strings: .*str.*got \[1\]"),
    (["a"], {"stop_ids": ["x"]}, "stop_ids: expected .*int.*got"),
    (["a"], {"logit_bias": [5]}, r"logit_bias: .*float.*got \[5\]"),
    (["a"], {"logit_bias": [[5]]}, r"logit_bias: .*float.*got \[\[5\]\]"),
    (["a"], {"prompt_logprobs": 1}, "prompt_logprobs: expected bool, got 1"),
    (["a"], {"temperature": 1e39}, r"temperature: expected in \[0, 1e\+06\]"),
    (
      ["a"],
      {"stop_ids": [2**40]},
      "stop ids of at most 263, got 1099511627776",
    ),
    (["a"], {"stop_ids": [-1]}, "stop_ids: expected >= 0"),
    (
      ["a"],
      {"stop_ids": [*range(65)]},
      "number of stop ids of at most 64, got 65",
    ),
    (["a"], {"stop_strings": ["\ud800"]}, "stop_strings: expected non-empty"),
    (["a"], {"seed": "x"}, r"seed: expected int \| None, got 'x'"),
  ],
)
def test_a_call_that_cannot_be_is_refused(sampler, prompts, given, expected):
  with pytest.raises(types.InputError, match=expected) as error:
    sampler.generate(prompts, **given)
  assert "\n" not in str(error.value)
  assert not sampler._engine.busy


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({"max_prompt": 0}, "max_prompt: expected a whole number >= 1, got 0"),
    ({"max_tokens": 500, "max_prompt": 13}, "at most 512 positions"),
    ({"data": 3, "rows": 4}, "rows: expected a multiple of data=3, got 4"),
    ({"data": 3, "tensor": 3}, "at most the 8 devices of this process"),
    (
      {"rows": 0},
      r"sampling.rows: expected a number in \[1, 16777216\], got 0",
    ),
    (
      {"block": 2**31},
      r"block: expected a number in \[1, 16777216\], got 2147",
    ),
    ({"seed": 2**64}, r"seed: expected a whole number in \[0, 2\*\*32\), got"),
    ({"seed": -1}, r"seed: expected a whole number in \[0, 2\*\*32\), got -1"),
    ({"top_logprobs": 265}, "top_logprobs: expected at most the 264 ids"),
    ({"rows": "many"}, "rows: expected int, got 'many'"),
    ({"dtype": "float16"}, "dtype: expected one of float32, bfloat16"),
    ({"in_flight": "drain"}, "in_flight: expected one of rows"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(folder, given, expected):
  sizes = {"max_prompt": 8, "max_tokens": 8} | given
  with pytest.raises(types.InputError, match=expected) as error:
    sampling.load(folder, **sizes)
  assert "\n" not in str(error.value)


def test_prompts_may_be_one_token_long(folder):
  short = sampling.load(folder, max_prompt=1, max_tokens=4, rows=2, group=2)
  long = sampling.load(folder, max_prompt=2, max_tokens=4, rows=2, group=2)
  one, two = (s.generate([[5], [7]], n=2) for s in (short, long))
  assert [s.tokens for s in one] == [s.tokens for s in two]


def test_weights_that_are_no_numbers_end_the_call(folder, monkeypatch):
  made = sampling.load(folder, max_prompt=4, max_tokens=4, rows=2)
  broken = jax.tree.map(lambda x: x * jnp.nan, made._policy.params)
  policy = dataclasses.replace(made._policy, params=broken)
  monkeypatch.setattr(made, "_policy", policy)
  with pytest.raises(types.RunError, match="got NaN from weights of version 0"):
    made.generate([[5]])


def test_a_folder_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(types.InputError, match="folder with config.json"):
    sampling.load(tmp_path / "nowhere")


def test_messages_need_a_template(tmp_path):
  tiny_folder.write(tmp_path, template=None)
  bare = sampling.load(tmp_path, max_prompt=8, max_tokens=2)
  with pytest.raises(types.InputError, match="no chat template"):
    bare.generate([[{"role": "user", "content": "x"}]])


def test_the_room_has_no_other_late_names():
  with pytest.raises(AttributeError, match="no 'store'"):
    _ = sampling.store
  assert jax.tree.leaves(sampling.load) == [sampling.load]
