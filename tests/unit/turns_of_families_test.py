"""Conversations with tools, in the engine, through each family's template."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_post import types
from jaxrl_post.data import (
  dataset,
  pack,
  segments,
  sources,
  tokenizer,
  tool_calls,
)
from jaxrl_post.envs import (
  conversations,
  conversing,
  multi_turn,
  renewal,
  tools,
)
from jaxrl_post.models import decoder as model_lib
from jaxrl_post.sampling import engine as engines
from tests.reference import chat_templates
from tests.unit import engines as making

_CONFIG = dataclasses.replace(making.CONFIG, vocab_size=272, num_layers=1)
_SAMPLING = engines.Sampling(rows=4, block=8, max_tokens=320, page=16)
_PROMPT = 192
_score = jax.jit(
  functools.partial(model_lib.logprobs, model_lib.Decoder(_CONFIG))
)

# What stands between two turns of the policy, by hand; {} is the result.
_CHATML = (
  "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
  "<|im_start|>assistant\n"
)
_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
BETWEEN = {
  "qwen2.5": ("hermes", _CHATML),
  "qwen3": ("hermes", _CHATML),
  "smollm2": (
    "hermes",
    "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n",
  ),
  "llama3": (
    "llama",
    _HEADER.format("ipython") + '"{}"<|eot_id|>' + _HEADER.format("assistant"),
  ),
  "gemma3": (
    "gemma",
    "\n<start_of_turn>user\n```tool_output\n{}\n```<end_of_turn>\n"
    "<start_of_turn>model\n",
  ),
}


@dataclasses.dataclass(frozen=True)
class Results:
  """Answers two turns as if each had called a tool, whatever it says."""

  style: str
  schemas = ()

  def reset(self, prompt):
    return 0

  def step(self, state, text):
    if state == 2:
      return multi_turn.Step()
    answers = tool_calls.results([("f", f"r{state}")], self.style)
    return multi_turn.Step(state=state + 1, messages=answers, calls=1)

  def failed(self, state, reason):
    raise AssertionError(reason)


@functools.cache
def made_of(name: str) -> tokenizer.Tokenizer:
  """Makes a family's tokenizer, of one id a byte."""
  family = chat_templates.FAMILIES[name]
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  places = enumerate([*family.special, *letters])
  backend = hf_tokenizers.Tokenizer(models.BPE({t: i for i, t in places}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(family.special))
  vocab = backend.get_vocab(with_added_tokens=True)
  ids = {token: vocab[token] for token in family.special}
  return tokenizer.Tokenizer(
    backend=backend,
    pad_id=0,
    eos_ids=(ids[family.end],),
    bos_id=ids[family.special[0]] if family.bos else None,
    names={"bos_token": family.special[0], "eos_token": family.end},
    template=family.template,
  )


def talked(name, renews=None):
  """Returns env, prompt and the conversations of a group."""
  tok = made_of(name)
  (end,) = tok.eos_ids
  sampling = types.SamplingParams(
    max_tokens=320, stop_ids=(end,), logit_bias=((end, 4.0),)
  )
  environment = Results(BETWEEN[name][0])
  cfg = multi_turn.Conversation(environment=lambda: environment, renewal=renews)
  env = conversations.build(
    cfg, environment, 2, sampling, tok, max_prompt=_PROMPT
  )
  assert isinstance(env, multi_turn.MultiTurn)
  messages = ({"role": "user", "content": "Hi"},)
  ids, text = tok.prompt_ids(messages)
  prompt = types.Prompt(
    uid=3, tokens=ids, text=text, reference=None, messages=messages
  )
  engine = making.engine(
    _SAMPLING, max_prompt=_PROMPT, group=2, key=5, config=_CONFIG
  )
  talks = conversing.Conversing(engine, env, lambda uid: prompt, lockstep=True)
  talks.add(env.request(prompt))
  done = []
  while talks.busy:
    done += talks.step(making.params(_CONFIG), 7)
  assert not any(engine._rows)  # Nothing is held any more.
  return tok, env, prompt, sorted(done, key=lambda c: c.uid)


def _scored(batches):
  """Puts two batches of a row together; returns what the trainer says, too."""
  rows = jax.tree.map(lambda *x: np.concatenate(x), *batches)
  logprobs, _ = _score(
    making.params(_CONFIG),
    tokens=rows.tokens,
    positions=rows.positions,
    segment_ids=rows.segment_ids,
    temperature=np.ones(rows.tokens.shape, np.float32),
  )
  return rows, logprobs


def test_c39_rows_that_begin_anew_are_scored_as_the_engine_sampled_them():
  tok, env, prompt, done = talked(
    "qwen3", renewal.Renewal(max_rows=3, retell=True)
  )
  batches = []
  for made in done:
    # Random bytes are no text: encoded again they are others, in a new prompt.
    assert made.segments and set(made.versions) <= {7, -1}
    rollout = dataclasses.replace(env.rollout(prompt, made), reward=1.0)
    for row in segments.split(rollout):
      text = tok.decode(row.prompt, skip_special=False)
      assert text.count("<|im_start|>user") == 1 + text.count("<tool_response>")
      assert text.endswith("<|im_start|>assistant\n")
    group = types.Group(prompt=prompt, rollouts=(rollout,))
    layout = pack.Layout(rows=3, length=_PROMPT + 321, alone=True)
    batch = pack.pack([group], layout)
    wide = {k: x for k, x in vars(batch).items() if getattr(x, "ndim", 0) == 2}
    for row in range(1 + len(made.segments)):
      own = {name: x[row : row + 1] for name, x in wide.items()}
      batches.append(dataclasses.replace(batch, **own))
  for pair in zip(batches, batches[1:], strict=False):
    rows, logprobs = _scored(pair)
    mask = rows.loss_mask > 0
    np.testing.assert_allclose(
      np.asarray(logprobs)[mask], rows.sampler_logprobs[mask], atol=1e-5
    )


# Two of them end and begin turns as qwen3 does.
_ALIKE = ("qwen2.5", "smollm2")
_RARELY = [pytest.param(name, marks=pytest.mark.slow) for name in _ALIKE]


@pytest.mark.parametrize("name", [*sorted(BETWEEN.keys() - _ALIKE), *_RARELY])
def test_c39_the_trainer_sees_the_tokens_of_the_engine_and_scores_its_own(name):
  tok, env, prompt, done = talked(name)
  assert [c.uid for c in done] == [6, 7]
  rollouts = []
  for made in done:
    assert made.finish == "stop" and len(made.turns) == 3
    own, begin = [], 0
    for i, turn in enumerate(made.turns):
      own.append(made.tokens[begin : turn.end])
      assert own[i][-1] in tok.eos_ids
      assert set(made.versions[begin : turn.end]) == {7}
      said = tok.encode(BETWEEN[name][1].format(f"r{i}")) if i < 2 else ()
      begin = turn.end + len(said)
      assert made.tokens[turn.end : begin] == said
      assert set(made.versions[turn.end : begin]) <= {-1}
    assert begin == len(made.tokens)
    rollout = env.rollout(prompt, made)
    assert rollout.text == tok.decode(own[-1])
    rollouts.append(dataclasses.replace(rollout, reward=1.0))
  batches = [
    pack.pack(
      [types.Group(prompt=prompt, rollouts=(rollout,))],
      pack.Layout(rows=1, length=_PROMPT + 321),
    )
    for rollout in rollouts
  ]
  rows, logprobs = _scored(batches)
  start = len(prompt.tokens)
  for row, made in enumerate(done):
    end = start + len(made.tokens)
    assert rows.tokens[row, :end].tolist() == [*prompt.tokens, *made.tokens]
    mask = rows.loss_mask[row, start:end]
    assert mask.tolist() == [v >= 0 for v in made.versions]
    assert not rows.loss_mask[row, end:].any()
    np.testing.assert_allclose(
      np.asarray(logprobs)[row, start:end][mask > 0],
      np.asarray(made.logprobs)[mask > 0],
      atol=1e-5,
    )


def test_prompts_of_messages_show_the_tools_and_prompts_of_text_do_not(
  tmp_path,
):
  tok = made_of("qwen2.5")
  tok.backend.save(str(tmp_path / "tokenizer.json"))
  settings = {
    "eos_token": tok.names["eos_token"],
    "chat_template": tok.template,
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

  def text(prompt, given):
    data = dataset.Data(
      train=sources.Generated(
        lambda i: types.Example(prompt=prompt, reference=i), 2
      ),
      max_prompt=4096,
    )
    loaded = dataset.load(
      data, model_path=str(tmp_path), vocab_size=272, seed=0, tools=given
    )
    return loaded.train[0].text

  shown = tools.Tools((tools.calculator(),), style="hermes").schemas
  messages = ({"role": "user", "content": "Hi"},)
  assert '"name": "calculator"' in text(messages, shown)
  assert "calculator" not in text(messages, ())
  assert text("Hi", shown) == "Hi"
