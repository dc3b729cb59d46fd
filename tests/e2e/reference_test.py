"""A model of its own as reference: it teaches, and is never anything else."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.algos import (
  algorithm,
  distill,
  divergence,
  dpo,
  grpo,
)
from jaxrl_post.algos import objective as objectives
from jaxrl_post.data import pack, tokenizer
from jaxrl_post.models import decoder, transformer, weights
from jaxrl_post.runtime import manifest
from jaxrl_post.training import lora
from tests.e2e import experiment, runs
from tests.reference import tiny_folder

STEPS = 30
_SHAPE = {
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 12,
  "vocab_size": 8,
}


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def write(folder: pathlib.Path, *, seed: int = 0, **options) -> pathlib.Path:
  """Writes a Qwen3 of random weights that speaks as the policy does."""
  tiny_folder.write(
    folder, "qwen3", seed=seed, template=None, **{**_SHAPE, **options}
  )
  spoken = tokenizer.characters(experiment.LETTERS)
  spoken.backend.save(str(folder / "tokenizer.json"))
  names = {"eos_token": tokenizer.EOS, "pad_token": tokenizer.PAD}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
  return folder


@pytest.fixture(name="teacher", scope="module")
def _teacher(tmp_path_factory) -> pathlib.Path:
  return write(tmp_path_factory.mktemp("model") / "teacher")


def taught(
  teacher: pathlib.Path,
  algo: algorithm.Algorithm,
  *assignments: str,
  **options,
) -> config.Run:
  """Returns the smallest run with a teacher; `options` are the teacher's."""
  run = dataclasses.replace(
    runs.configured(),
    algo=algo,
    reference=decoder.Model(path=str(teacher), **options),
  )
  return config.override(run, assignments)


def train(folder: pathlib.Path, cfg: config.Run) -> types.TrainState:
  folder.mkdir(exist_ok=True)
  return loop.run(cfg, prepare.prepare(cfg), folder)


@functools.partial(jax.jit, static_argnums=1)
def _predicted(params, shape, tokens):
  places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _ = transformer.forward(params, shape, tokens, places)
  return jax.nn.log_softmax(transformer.logits(params, shape, hidden[:, -1]))


def reverse_kl(params: types.Tree, cfg: config.Run) -> float:
  """Returns KL(policy || teacher) of the first token, exactly, in nats.

  A mean over all prompts that there are.
  """
  assert cfg.reference is not None and cfg.reference.path is not None
  shape = weights.read_config(cfg.reference.path)
  teacher = weights.read_params(cfg.reference.path, shape)
  encode = prepare.prepare(cfg).data.tokenizer.encode
  asked = [encode(str(experiment.make(i).prompt)) for i in range(16)]
  ours, theirs = (
    np.asarray(_predicted(jax.device_get(p), model, jnp.array(asked)))
    for p, model in ((params, cfg.model.config), (teacher, shape))
  )
  return float(np.mean(np.sum(np.exp(ours) * (ours - theirs), axis=-1)))


@pytest.fixture(name="distilled", scope="module")
def _distilled(teacher, tmp_path_factory):
  """Returns a state and metrics, and the reverse KL of the first weights."""
  cfg = taught(teacher, distill.objective(), f"num_steps={STEPS}")
  folder = tmp_path_factory.mktemp("runs") / "distilled"
  first = loop.build(cfg, prepare.prepare(cfg)).draw()
  with runs.compile_cache():
    state = train(folder, cfg)
  return state, runs.metrics(folder), reverse_kl(first, cfg)


def test_a_policy_comes_closer_to_a_teacher_of_another_shape(
  distilled, teacher
):
  state, lines, start = distilled
  kl = [line["loss/kl"] for line in lines]
  assert np.mean(kl[-5:]) < 0.5 * np.mean(kl[:3])
  cfg = taught(teacher, distill.objective())
  assert reverse_kl(state.params, cfg) < 0.5 * start


@pytest.mark.slow
def test_so_it_does_by_the_teachers_most_probable_tokens(
  distilled, teacher, tmp_path
):
  cfg = taught(teacher, distill.top(4), f"num_steps={STEPS}")
  state = train(tmp_path / "run", cfg)
  losses = [line["loss/policy"] for line in runs.metrics(tmp_path / "run")]
  assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])
  assert reverse_kl(state.params, cfg) < 0.5 * distilled[2]


def _bits(state: types.TrainState) -> list[np.ndarray]:
  state = dataclasses.replace(state, key=jax.random.key_data(state.key))
  return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_c118_a_run_goes_on_with_its_teacher_and_no_other(distilled, tmp_path):
  whole, _, _ = distilled
  teacher = write(tmp_path / "teacher")
  cfg = taught(teacher, distill.objective(), "num_steps=3")
  train(tmp_path / "run", cfg)
  (saved,) = (tmp_path / "run" / "checkpoints").glob("*3")
  assert not [x for x in manifest.read(saved).leaves if "reference" in x]
  more = config.override(cfg, [f"num_steps={STEPS}"])
  halves = train(tmp_path / "run", more)
  assert halves.reference is None
  for one, two in zip(_bits(whole), _bits(halves), strict=True):
    np.testing.assert_array_equal(one, two)
  write(teacher, seed=1)
  more = config.override(cfg, [f"num_steps={STEPS + 1}"])
  words = f"got one of step {STEPS} of another, with other weights of its ref"
  with pytest.raises(types.InputError, match=words) as error:
    train(tmp_path / "run", more)
  assert "\n" not in str(error.value)


def _kinds(tree: types.Tree) -> set[str | None]:
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def _rows(cfg: config.Run, parts: prepare.Parts) -> types.Batch:
  """Packs completions that say what was asked."""
  groups = []
  for uid in range(cfg.groups_per_step):
    prompt = parts.data.train[uid]
    made = [
      types.Completion(
        uid=uid * cfg.group_size + number,
        tokens=(*prompt.tokens[: 1 + number % 2], 1),
        logprobs=(-2.0,) * (2 + number % 2),
        versions=(0,) * (2 + number % 2),
        finish="stop",
      )
      for number in range(cfg.group_size)
    ]
    rollouts = [
      types.Rollout(
        prompt=prompt,
        completion=one,
        temperature=1.0,
        text="",
        reward=float(one.uid % 2),
      )
      for one in made
    ]
    groups.append(types.Group(prompt=prompt, rollouts=tuple(rollouts)))
  return pack.pack(groups, prepare.layout(cfg, parts.decoder.config, 1))


def _stepped(cfg: config.Run, updates: int = 2):
  """Returns the reference, the state, the batch and the metrics at the end."""
  parts = prepare.prepare(cfg)
  place = loop.build(cfg, parts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  teacher, metrics = place.reference().params, {}
  state, rows = trainer.start(place.draw()), _rows(cfg, parts)
  batch = trainer.score(state, trainer.put(rows), teacher)
  for _ in range(updates):
    state, metrics = trainer.update(state, batch)
    batch = trainer.score(state, trainer.put(rows), teacher)
  kept = state.reference if teacher is None else teacher
  return kept, state, jax.device_get(batch), jax.device_get(metrics)


@pytest.mark.parametrize("case", ["teacher", "first weights", "moving"])
def test_a_reference_that_is_parked_changes_no_bit(teacher, case):
  if case == "teacher":
    cfg = taught(teacher, distill.objective())
  else:
    every = 1 if case == "moving" else 0
    cfg = _with(_kl(every=every, share=0.5))
  parked = config.override(cfg, ["placement.park=reference"])
  (kept, one, *rest), (away, two, *others) = _stepped(cfg), _stepped(parked)
  assert (_kinds(kept), _kinds(away)) == ({"device"}, {"pinned_host"})
  jax.tree.map(np.testing.assert_array_equal, kept, away)
  for ours, theirs in zip(_bits(one), _bits(two), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  jax.tree.map(np.testing.assert_array_equal, rest, others)


def test_its_weights_lie_on_the_training_mesh_in_its_own_dtype(teacher):
  digests = []
  four = (
    "placement.mode=split",
    "placement.training.fsdp=2",
    "placement.training.data=2",
  )
  for axes in ((), four):
    cfg = taught(teacher, distill.objective(), *axes, dtype="bfloat16")
    place = loop.build(cfg, prepare.prepare(cfg))
    found = place.reference()
    digests.append(found.digest)
    for leaf in jax.tree.leaves(found.params):
      assert leaf.dtype == jnp.bfloat16
      assert leaf.sharding.device_set == set(place.meshes.training.devices.flat)
    assert not found.params["embed"].sharding.is_fully_replicated or not axes
  # The same on any mesh, and another for other weights.
  assert digests[0] == digests[1]
  cfg = taught(teacher, distill.objective())
  other = loop.build(cfg, prepare.prepare(cfg)).reference()
  assert other.digest != digests[0]


def test_adapters_are_judged_by_the_teacher(teacher):
  cfg = taught(teacher, distill.objective())
  adapted = config.override(cfg, ["optim.trained.rank=2"])
  (_, state, batch, _), (_, _, other, _) = (
    _stepped(one, updates=0) for one in (adapted, cfg)
  )
  assert state.adapters is not None and state.reference is None
  np.testing.assert_allclose(
    batch.reference_logprobs, other.reference_logprobs, atol=1e-6
  )
  assert np.abs(batch.reference_logprobs - batch.old_logprobs).max() > 0.1


# -------------------------------------------------------------- what is refused


def _kl(**options) -> objectives.Objective:
  kl = divergence.Kl(0.1, **options)
  return dataclasses.replace(grpo.objective(), kl=kl)


def _with(algo: algorithm.Algorithm, **fields) -> config.Run:
  return dataclasses.replace(runs.configured(), algo=algo, **fields)


_MODEL = decoder.Model(path="teacher")
_ADAPTED = dataclasses.replace(
  runs.configured().optim, trained=lora.Lora(rank=2, alpha=4.0)
)


@pytest.mark.parametrize(
  ("algo", "fields", "assignments", "words"),
  [
    (grpo.objective(), {"reference": _MODEL}, (), "reference: expected none"),
    (distill.objective(), {}, (), "reference: expected a model .* got none"),
    (distill.top(4), {}, (), "reference: expected a model .* got none"),
    (_kl(every=5), {"reference": _MODEL}, (), "algo.kl.every: expected 0"),
    (
      _kl(),
      {"reference": dataclasses.replace(_MODEL, remat="layer")},
      (),
      "reference.remat: expected none",
    ),
    (
      distill.objective(),
      {"reference": _MODEL},
      ("stream.filter_zero_signal=true",),
      "filter_zero_signal: expected false with a teacher",
    ),
    (grpo.objective(), {}, ("placement.park=reference",), "placement.park: "),
    (
      _kl(),
      {"optim": _ADAPTED},
      ("placement.park=reference",),
      "placement.park: expected reference only where",
    ),
  ],
)
def test_half_a_reference_is_refused(algo, fields, assignments, words):
  with pytest.raises(types.InputError, match=words) as error:
    config.override(_with(algo, **fields), assignments)
  assert "\n" not in str(error.value)


def test_what_a_reference_may_be_combined_with_is_not_refused():
  _with(dpo.objective(), group_size=2, reference=_MODEL)
  _with(_kl(), reference=_MODEL, optim=_ADAPTED)
  parked = ["placement.park=reference"]
  config.override(_with(_kl(), reference=_MODEL, optim=_ADAPTED), parked)
  config.override(_with(_kl()), parked)
  found = config.override(_with(_kl()), ["reference.path=x"]).reference
  assert found == decoder.Model(path="x")


def _without(name: str):
  return lambda folder: (folder / name).unlink()


def _spoken(folder: pathlib.Path) -> None:
  other = tokenizer.characters(experiment.LETTERS[::-1])
  other.backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
  ("options", "spoil", "words"),
  [
    ({}, shutil.rmtree, r"reference.path: expected a folder .* got none at"),
    ({"vocab_size": 9}, None, "reference: .* policy's 8 ids, got one with 9"),
    (
      {"max_position_embeddings": 7},
      None,
      "reference: .* at least 8 positions, got one with 7",
    ),
    ({}, _spoken, "reference.path: expected the tokens of the policy, got 'a'"),
    ({}, _without("tokenizer.json"), "expected a folder with tokenizer.json"),
    ({}, _without("model.safetensors"), "expected model.safetensors"),
    ({}, _without("config.json"), "config.json: expected a JSON file"),
  ],
)
def test_another_model_is_refused_before_a_device_is_touched(
  options, spoil, words, tmp_path
):
  folder = write(tmp_path / "teacher", **options)
  if spoil is not None:
    spoil(folder)
  cfg = taught(folder, distill.objective())
  with pytest.raises(types.InputError, match=words) as error:
    prepare.prepare(cfg)
  assert "\n" not in str(error.value)


def test_a_teacher_that_is_drawn_is_not_the_policy(tmp_path):
  shape = runs.configured().model.config
  cfg = _with(distill.objective(), reference=decoder.Model(config=shape))
  place = loop.build(cfg, prepare.prepare(cfg))
  embed = place.reference().params["embed"]
  assert np.max(np.abs(embed - place.draw()["embed"])) > 0.1
