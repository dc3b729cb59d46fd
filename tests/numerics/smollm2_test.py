"""A real model: SmolLM2-135M-Instruct against stored values."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import among, gguf_io, hf_format, transformer, weights

VALUES = pathlib.Path(__file__).parents[1] / "reference" / "values"
ATOL = 5e-4  # float32, 30 layers, logits up to 37.
SLOTS = 128


@pytest.fixture(scope="module")
def path() -> str:
  return weights.smollm2_path()


@pytest.fixture(scope="module")
def tokenizer(path) -> tokenizers.Tokenizer:
  return tokenizers.load(path)


@pytest.fixture(scope="module")
def model(path):
  cfg = weights.read_config(path)
  return cfg, weights.read_params(path, cfg)


@pytest.fixture(scope="module")
def stored() -> dict:
  values = json.loads((VALUES / "smollm2.json").read_text(encoding="utf-8"))
  return values | dict(np.load(VALUES / "smollm2.npz"))


@pytest.fixture(scope="module")
def texts(stored) -> list[dict]:
  return [r for r in stored["records"] if "message" not in r]


@pytest.fixture(scope="module")
def chats(stored) -> list[dict]:
  return [r for r in stored["records"] if "message" in r]


@functools.partial(jax.jit, static_argnums=1)
def all_logits(params, cfg, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _ = transformer.forward(params, cfg, tokens, positions)
  return transformer.logits(params, cfg, hidden)


def padded(rows: list[list[int]]) -> np.ndarray:
  out = np.zeros((len(rows), 48), np.int32)
  for i, ids in enumerate(rows):
    out[i, : len(ids)] = ids
  return out


@functools.partial(jax.jit, static_argnums=1, donate_argnums=4)
def extend(params, cfg, tokens, positions, cache):
  rows = np.arange(tokens.shape[0])[:, None]
  mask = (jnp.arange(SLOTS) <= positions[..., None])[:, None]

  def attend(cache, q, k, v, local):
    del local
    k = cache[0].at[rows, positions].set(k)
    v = cache[1].at[rows, positions].set(v)
    return among.attention(q, k, v, mask), (k, v)

  hidden, cache = transformer.forward(
    params, cfg, tokens, positions, cache=cache, attend=attend
  )
  return jnp.argmax(transformer.logits(params, cfg, hidden), -1), cache


def greedy(model, prompts: list[list[int]], num_tokens: int) -> np.ndarray:
  """Continues prompts, padded on the right, with the likeliest tokens."""
  cfg, params = model
  rows = padded(prompts)
  shape = (cfg.num_layers, len(prompts), SLOTS, cfg.num_kv_heads)
  cache = tuple(jnp.zeros((*shape, cfg.head_width)) for _ in range(2))
  positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
  best, cache = extend(params, cfg, rows, positions, cache)
  at = np.array([[len(ids)] for ids in prompts])
  token = np.take_along_axis(np.asarray(best), at - 1, axis=1)
  answers = [token]
  # Padding left keys behind; each is overwritten before it can be seen.
  for _ in range(num_tokens - 1):
    token, cache = extend(params, cfg, token, at, cache)
    answers.append(np.asarray(token))
    at = at + 1
  return np.concatenate(answers, axis=1)


def test_ids_of_texts_are_those_of_transformers(tokenizer, texts):
  for record in texts:
    assert tokenizer.encode(record["text"]) == tuple(record["ids"])
    assert tokenizer.prompt_ids(record["text"])[0] == tuple(record["ids"])
    assert tokenizer.decode(record["ids"]) == record["text"]


def test_chat_prompts_are_those_of_transformers(tokenizer, chats):
  for record in chats:
    ids, text = tokenizer.prompt_ids((record["message"],))
    assert text == record["text"]
    assert ids == tuple(record["ids"])
    # The template writes the begin token; none is put before it.
    assert ids[0] == 1 and ids[1] != 1


def test_special_ids_come_from_the_file(tokenizer, model):
  assert tokenizer.eos_ids == (2,)
  assert tokenizer.pad_id == 2
  assert tokenizer.bos_id is None
  assert tokenizer.vocab_size == model[0].vocab_size == 49152
  tokenizers.check_vocab(tokenizer, model[0].vocab_size)


def test_logits_are_those_of_transformers(model, stored, texts):
  cfg, params = model
  rows = [record["ids"] for record in texts]
  got = np.asarray(all_logits(params, cfg, padded(rows)))
  for i, ids in enumerate(rows):
    logits = got[i, : len(ids)]
    np.testing.assert_array_equal(logits.argmax(-1), stored[f"argmax_{i}"])
    for name, part in (
      (f"last_{i}", logits[-1]),
      (f"columns_{i}", logits[:, stored["columns"]]),
    ):
      np.testing.assert_allclose(part, stored[name], rtol=0, atol=ATOL)


def test_queries_and_keys_in_the_order_of_the_file_are_another_model(
  model, path, stored, texts, monkeypatch
):
  cfg, params = model
  monkeypatch.setattr(gguf_io, "unpermute", lambda weight, heads: weight)
  entries = gguf_io.read(path).entries
  layers = dict(params["layers"])
  for leaf in "qk":
    shape = layers[leaf].shape
    # A buffer of its own: JAX may keep it instead of a copy.
    stack = np.empty(shape, np.float32)
    for name, tensor in hf_format.tensors(cfg).items():
      if tensor.leaf == ("layers", leaf):
        value = tensor.arrange(entries[name].read(), shape[1:])
        stack[tensor.layer] = value
    layers[leaf] = jax.device_put(stack, layers[leaf].sharding)
  rows = padded([record["ids"] for record in texts])
  got = np.asarray(all_logits({**params, "layers": layers}, cfg, rows))
  for i, record in enumerate(texts):
    last = got[i, len(record["ids"]) - 1]
    assert np.abs(last - stored[f"last_{i}"]).max() > 1


def test_greedy_answers_with_a_cache_are_those_of_transformers(
  model, tokenizer, texts, chats
):
  records = [texts[0], *chats]
  prompts = [record["ids"] for record in records]
  longest = max(len(record["answer"]) for record in records)
  assert longest == 64
  answers = greedy(model, prompts, longest)
  for row, record in zip(answers, records, strict=True):
    assert row[: len(record["answer"])].tolist() == record["answer"]
  assert tokenizer.decode(texts[0]["answer"]).startswith(" Paris.")
  said = [tokenizer.decode(r["answer"], skip_special=False) for r in chats]
  assert said == [r["answer_text"] for r in chats]
  assert said[0] == "2 + 3 = 5<|im_end|>"
  assert said[1] == "1. Bananas\n2. Oranges\n3. Grapes<|im_end|>"
