"""A reward model judges a run: beside functions or alone, wherever it lies."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import collect, config, loop, prepare, scorer, types
from jaxrl_post.models import transformer, weights
from jaxrl_post.placement import reward_model
from jaxrl_post.rewards import model as models
from jaxrl_post.rewards import pool, protocol
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import dump
from tests.e2e import experiment, runs
from tests.reference import tiny_folder

# Wider than the policy's, and with words of its own.
_SHAPE = {
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("model") / "judge"
  options = tiny_folder.classifier("qwen2", **_SHAPE)
  tiny_folder.write(folder, "qwen2", **options)
  return folder


def judged(
  folder: pathlib.Path,
  *assignments: str,
  functions: tuple[protocol.Reward, ...] = (experiment.score,),
  **options,
) -> config.Run:
  """Returns the smallest run with a reward model; `options` are the model's."""
  made = {"weight": 0.5, "name": "judge", "batch": 4, "max_tokens": 64}
  model = models.Model(path=str(folder), **{**made, **options})
  rewards = pool.Rewards(functions=functions, model=model)
  run = dataclasses.replace(runs.configured("num_steps=2"), rewards=rewards)
  return config.override(run, assignments)


@dataclasses.dataclass(frozen=True)
class Made:
  """What a run left behind."""

  groups: list[types.Group]
  metrics: list[dict]
  trace: list[dict]

  @property
  def rollouts(self) -> list[types.Rollout]:
    return [rollout for group in self.groups for rollout in group.rollouts]


def train(folder: pathlib.Path, cfg: config.Run) -> Made:
  groups, pack = [], loop.pack.pack

  def noting(batch, *layout, **rest):
    groups.extend(batch)
    return pack(batch, *layout, **rest)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.pack, "pack", noting)
    parts = prepare.prepare(cfg)
    prepare.plan(cfg, parts, jax.device_count())
    loop.run(cfg, parts, folder)
  lines = (folder / "trace.json").read_text().removesuffix(",\n")
  return Made(groups, runs.metrics(folder), json.loads(f"{lines}]"))


def expected(folder: pathlib.Path, rollouts) -> np.ndarray:
  """Scores conversations that are written and cut by hand."""
  hf = json.loads((folder / "config.json").read_text())
  fields = {k: v for k, v in hf.items() if k != "architectures"}
  shape = dataclasses.replace(weights.from_fields(fields), tie_embeddings=True)
  params = weights.read_params(str(folder), shape, besides=("score.weight",))
  tokens = np.full((len(rollouts), 96), 9, np.int32)
  ends = []
  bytes_to_ids = tiny_folder.byte_tokenizer()
  for row, rollout in zip(tokens, rollouts, strict=True):
    question = rollout.prompt.text
    assert rollout.prompt.messages == ({"role": "user", "content": question},)
    text = (
      f"<|im_start|>user\n{question}<|im_end|>\n"
      f"<|im_start|>assistant\n{rollout.text}<|im_end|>\n"
    )
    ids = bytes_to_ids.encode(text).ids
    row[: len(ids)] = ids
    ends.append(len(ids) - 1)
  places = jnp.broadcast_to(jnp.arange(96), tokens.shape)

  @jax.jit
  def forward(params, tokens):
    return transformer.forward(params, shape, tokens, places)[0]

  hidden = np.asarray(forward(params, jnp.asarray(tokens)))
  head = tiny_folder.arrays(hf)["score.weight"][0]
  return hidden[np.arange(len(rollouts)), ends] @ head


@pytest.fixture(name="one", scope="module")
def _one(folder, tmp_path_factory) -> Made:
  with runs.compile_cache():
    return train(tmp_path_factory.mktemp("one"), judged(folder))


def _parts(rollouts) -> np.ndarray:
  return np.asarray([r.parts["judge"] for r in rollouts])


def test_its_score_is_that_of_its_own_words_and_counts_with_its_weight(
  one, folder
):
  rollouts = one.rollouts
  assert len(rollouts) == 2 * 16
  by_hand = expected(folder, rollouts)
  assert np.std(by_hand) > 0.1
  np.testing.assert_allclose(_parts(rollouts), by_hand, atol=1e-4)
  for r in rollouts:
    right = experiment.score(r, r.prompt.reference)
    assert r.parts == {"score": right, "judge": r.parts["judge"]}
    assert r.reward == pytest.approx(right + 0.5 * r.parts["judge"])


def test_its_score_is_a_part_in_the_metrics(one):
  for step, line in enumerate(one.metrics[-2:]):
    batch = one.rollouts[16 * step : 16 * step + 16]
    mean = np.mean(_parts(batch))
    assert line["reward/part/judge"] == pytest.approx(mean)
    assert line["reward/missing"] == 0


def test_its_time_is_in_the_trace_and_its_devices_are_busy_meanwhile(one):
  found = [e for e in one.trace if e["name"] == "reward model"]
  stage = [e for e in found if e["tid"] == 2]
  calls = [e for e in found if e["tid"] == 3 or e["tid"] > 3_000_000]
  assert len(found) == len(stage) + len(calls)
  assert {e["cat"] for e in stage} == {"busy"}
  # One program reads 4 conversations.
  assert sum(e["args"]["calls"] for e in calls) == 2 * 16
  assert len(calls) >= 2 * 16 / 4


@pytest.mark.parametrize(
  ("where", "assignments"),
  [
    # Its programs and those of the engine communicate, from two threads.
    ({}, ("placement.training.fsdp=2", "placement.generation.tensor=2")),
    ({"devices": (3, 4), "tensor": 2}, ()),
  ],
  ids=["with two that generate", "on two of its own"],
)
def test_wherever_it_lies_rewards_are_the_same(
  where, assignments, one, folder, tmp_path
):
  split = ("placement.mode=split", "max_lag=1", *assignments)
  made = train(tmp_path, judged(folder, *split, functions=(), **where))
  assert len(made.rollouts) == 2 * 16
  np.testing.assert_allclose(
    _parts(made.rollouts), expected(folder, made.rollouts), atol=1e-4
  )
  # The first weights have sampled the same, with one device or with several.
  ours = {r.completion.uid: r for r in one.rollouts[:16]}
  first = [
    r
    for r in made.rollouts
    if r.completion.uid in ours and set(r.completion.versions) == {0}
  ]
  assert first
  for theirs in first:
    here = ours[theirs.completion.uid]
    assert here.completion.tokens == theirs.completion.tokens
    assert theirs.reward == 0.5 * theirs.parts["judge"]
    assert theirs.parts["judge"] == pytest.approx(here.parts["judge"], abs=1e-5)


@pytest.mark.slow
def test_rollouts_without_training_have_its_score_too(one, folder, tmp_path):
  cfg = judged(folder, "num_steps=1")
  parts = prepare.prepare(cfg)
  made = collect.run(cfg, parts, tmp_path, tmp_path / "dump")
  assert made.rewarded == 16
  found = [r for g in dump.read_all(tmp_path / "dump") for r in g.rollouts]
  np.testing.assert_allclose(_parts(found), _parts(one.rollouts[:16]))


def test_programs_are_few_and_a_neighbour_changes_no_bit(folder):
  cfg = judged(folder, functions=(), max_tokens=128, batch=2)
  parts = prepare.prepare(cfg)
  place = loop.build(cfg, parts)
  clock = clocks.Clock(("generation", "training"))
  texts = ["a", "a", "bc" * 30, "", "a", "abcd" * 18, "dd", "a", "bc" * 30]
  with scorer.opened(cfg, parts, place, clock) as judge:
    compiled = clock.compilations
    made = [
      future.result(60)
      for some in (texts[:1], texts, texts[1:4], texts[::-1], texts[3:])
      for future in judge.submit_all([_said(text) for text in some])
    ]
    assert clock.compilations == compiled
  clock.close()
  # Of two lengths each; more than one program has read most texts.
  assert len(reward_model.lengths(128)) == 2
  for text in texts:
    found = {r.parts["judge"] for r in made if r.text == text}
    assert len(found) == 1
  assert len({r.reward for r in made}) == len(set(texts))


def _said(text: str) -> types.Rollout:
  asked = ({"role": "user", "content": "ab"},)
  return types.Rollout(
    prompt=types.Prompt(
      uid=0, tokens=(2, 3), text="ab", reference="a", messages=asked
    ),
    completion=types.Completion(
      uid=0, tokens=(), logprobs=(), versions=(), finish="stop"
    ),
    temperature=1.0,
    text=text,
  )
