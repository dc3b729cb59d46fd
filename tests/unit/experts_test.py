"""Mixtures of experts: read, refused, sampled from, and counted."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import config, prepare, types
from jaxrl_post.algos import divergence
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts, hf_format, transformer, weights
from jaxrl_post.models import spec as specs
from jaxrl_post.planning import costs
from jaxrl_post.sampling import engine as engines
from jaxrl_post.training import lora
from tests.e2e import runs
from tests.reference import tiny_folder
from tests.unit import engines as making

HF = tiny_folder.MIXTURES["qwen3_moe"]
CONFIG = dataclasses.replace(
  making.CONFIG, ff_width=24, experts=experts.Experts(num=8, per_token=2)
)


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


def folder_of(tmp_path: pathlib.Path, **options) -> str:
  tiny_folder.write(tmp_path / "model", "qwen3_moe", **options)
  return str(tmp_path / "model")


# ----------------------------------------------------------------- checkpoints


def test_the_shape_is_that_of_its_config(tmp_path):
  cfg = weights.read_config(folder_of(tmp_path))
  assert cfg == transformer.Config(
    num_layers=3,
    width=48,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    ff_width=20,
    vocab_size=264,
    rope_theta=1e6,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=512,
    experts=experts.Experts(num=8, per_token=3, normalize=True),
  )


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step: expected 1, got 2"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers: expected \[\], got \[0\]"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ({"num_experts": None}, "num_experts"),
    ({"num_experts_per_tok": 9}, "per_token: expected 1 to 8, .* got 9"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ({"num_experts": 1}, "experts.num: expected >= 2, got 1"),
    ({"attention_bias": True}, "attention_bias"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
  ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, options, named):
  (tmp_path / "config.json").write_text(json.dumps({**HF, **options}))
  with refused(named) as caught:
    weights.read_config(str(tmp_path))
  assert "\n" not in str(caught.value)


def test_both_names_of_the_number_of_experts_are_read(tmp_path):
  hf = {k: v for k, v in HF.items() if k != "num_experts"}
  hf |= {"num_local_experts": 16, "norm_topk_prob": None}
  (tmp_path / "config.json").write_text(json.dumps(hf))
  cfg = weights.read_config(str(tmp_path))
  assert cfg.experts == experts.Experts(16, 3, normalize=False)


def test_every_place_of_a_leaf_is_of_one_tensor(tmp_path):
  cfg = weights.read_config(folder_of(tmp_path))
  table = hf_format.tensors(cfg)
  assert set(table) == set(tiny_folder.shapes(HF))
  tree = transformer.spec(cfg)
  found: dict[tuple, list] = {}
  for tensor in table.values():
    found.setdefault(tensor.leaf, []).append(tensor.index)
  for leaf, places in found.items():
    weight = functools.reduce(lambda node, key: node[key], leaf, tree)
    dims = {len(place) for place in places}
    assert len(dims) == 1
    every = list(np.ndindex(*weight.shape[: dims.pop()]))
    assert sorted(places) == every
  down = table["model.layers.2.mlp.experts.5.down_proj.weight"]
  assert (down.index, down.shape) == ((2, 5), (48, 20))
  assert table["model.layers.2.mlp.gate.weight"].index == (2,)


def test_weights_are_read_into_the_shards_that_hold_them(tmp_path):
  path = folder_of(tmp_path, seed=3)
  cfg = weights.read_config(path)
  stored = tiny_folder.arrays(HF, 3)
  whole = weights.read_params(path, cfg)
  layers = whole["layers"]
  at = "model.layers.2.mlp."
  for name, leaf in (("gate", "gate"), ("up", "up"), ("down", "down")):
    tensor = stored[f"{at}experts.6.{name}_proj.weight"]
    np.testing.assert_array_equal(layers[f"expert_{leaf}"][2, 6], tensor.T)
  np.testing.assert_array_equal(
    layers["router"][2], stored[f"{at}gate.weight"].T
  )
  mesh = jax.make_mesh(
    (4, 2), ("e", "f"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  parts = specs.partition(
    transformer.spec(cfg), {"experts": "e", "embed": "f"}, dict(mesh.shape)
  )
  home = jax.tree.map(
    lambda p: jax.NamedSharding(mesh, p),
    parts,
    is_leaf=lambda x: isinstance(x, jax.P),
  )
  placed = weights.read_params(path, cfg, home)
  jax.tree.map(np.testing.assert_array_equal, placed, whole)
  shard = placed["layers"]["expert_gate"].addressable_shards[0]
  assert shard.data.shape == (3, 2, 24, 20)


def test_a_missing_expert_is_named(tmp_path):
  path = folder_of(tmp_path)
  name = "model.layers.1.mlp.experts.7.up_proj.weight"
  rest = {k: v for k, v in tiny_folder.arrays(HF).items() if k != name}
  tiny_folder.write_weights(pathlib.Path(path), rest)
  with refused(f"expected tensor {name}, got none"):
    weights.read_params(path, weights.read_config(path))


# --------------------------------------------------------------------- settings


def _run(**changes) -> config.Run:
  return dataclasses.replace(runs.configured(exp="moe"), **changes)


def test_eight_bits_are_refused_in_one_line():
  run = _run()
  with refused("sampling.dtype: expected float32 or bfloat16 for a mix") as got:
    prepare.model(
      _run(sampling=dataclasses.replace(run.sampling, dtype="int8"))
    )
  assert "\n" not in str(got.value)


def test_adapters_are_of_attention():
  tree = transformer.spec(CONFIG)
  made = lora.spec(tree, lora.Lora(targets=("q", "k", "v", "o")))
  assert set(made["layers"]) == {"q", "k", "v", "o"}
  with refused("targets: expected names among q, k, v, o, got 'gate'"):
    lora.spec(tree, lora.Lora())


def test_balance_is_of_experts_that_train():
  run = _run()
  assert prepare.model(run).balance == 0.01
  dense = runs.configured("model.balance.coef=0.01")
  with refused("model.balance: expected none for a model without experts"):
    prepare.model(dense)
  with refused(r"model.balance.coef: expected in \(0, 1\], got 0"):
    experts.Balance(0.0)
  algo = dataclasses.replace(run.algo, kl=divergence.Kl(0.1))
  both = _run(algo=algo, reference=run.model)
  with refused("reference.balance: expected none, as a reference does not"):
    prepare.reference(both, prepare.model(run).config)
  routed = dataclasses.replace(
    run.model, balance=None, routing=experts.Routing()
  )
  both = _run(algo=algo, reference=routed)
  with refused("reference.routing: expected none, as a reference does not"):
    prepare.reference(both, prepare.model(run).config)


def test_the_shape_in_a_runs_file_is_read_back():
  run = _run()
  tree = json.loads(json.dumps(config.to_json(run)))
  shape = run.model.config
  none, one = (transformer.layer_flops(shape, n) for n in (0, 1))
  assert costs._key_cost(tree["model"]) == one / none - 1


def test_a_token_costs_the_experts_that_it_goes_through():
  per_token = transformer.layer_flops(CONFIG, 0)
  other = dataclasses.replace(CONFIG, experts=experts.Experts(8, 5))
  more = transformer.layer_flops(other, 0) - per_token
  assert more == 2 * 3 * (3 * 32 * 24)
  wider = dataclasses.replace(CONFIG, experts=experts.Experts(9, 2))
  assert transformer.layer_flops(wider, 0) - per_token == 2 * 32


# --------------------------------------------------------------------- sampling


def _request(prompt, uids, **options):
  sampling = types.SamplingParams(**{"max_tokens": 10, **options})
  return types.Request(prompt=prompt, uids=tuple(uids), sampling=sampling)


def _generate(requests, rows):
  cfg = engines.Sampling(rows=rows, max_tokens=12, block=4)
  engine = making.engine(cfg, max_prompt=8, group=2, config=CONFIG)
  policy = types.Policy(params=making.params(CONFIG, seed=3), version=0, step=0)
  return engines.generate(engine, policy, requests)


def test_decoding_gives_the_numbers_of_a_teacher_forced_forward():
  asks = [_request((5, 9, 2), [1, 2]), _request((7,), [3], temperature=0.6)]
  made = _generate(asks, rows=4)
  prompts = [ask.prompt for ask in asks for _ in ask.uids]
  heats = [ask.sampling.temperature for ask in asks for _ in ask.uids]
  whole = [(*p, *c.tokens) for p, c in zip(prompts, made, strict=True)]
  tokens = np.zeros((len(whole), 13), np.int32)
  for row, ids in zip(tokens, whole, strict=True):
    row[: len(ids)] = ids
  score = functools.partial(decoders.logprobs, decoders.Decoder(CONFIG))
  logprobs, _ = jax.jit(score)(
    making.params(CONFIG, seed=3),
    tokens=jnp.asarray(tokens),
    positions=jnp.broadcast_to(jnp.arange(13), tokens.shape),
    segment_ids=jnp.ones(tokens.shape, jnp.int32),
    temperature=jnp.broadcast_to(jnp.asarray(heats)[:, None], tokens.shape),
  )
  for prompt, ids, found, completion in zip(
    prompts, whole, logprobs, made, strict=True
  ):
    np.testing.assert_allclose(
      completion.logprobs, found[len(prompt) : len(ids)], atol=1e-5, rtol=1e-5
    )
  assert len({completion.tokens for completion in made}) == 3


def test_neighbours_change_nothing():
  ask = _request((5, 9, 2), [1, 2])
  alone = _generate([ask], rows=4)
  others = [_request((n,), [10 + n]) for n in range(5)]
  among = _generate([*others, ask], rows=4)[-2:]
  for one, other in zip(alone, among, strict=True):
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
