"""llama.cpp on a workload, for bench/rollout.py.

    echo 0 | PYTHON bench/peer_llama_cpp.py W1

Runs in an environment with llama-cpp-python and gguf. All rows are sequences of
one batch in float32. A prompt is read once and its keys and values copied to
the other rows of its group; a row leaves the batch when it has its length.
"""

import ctypes
import pathlib
import sys
import tempfile
from typing import Any

import gguf
import llama_cpp
import numpy as np
import workloads

_FLOAT32 = 0
_NAMES = {
  "q": "attn_q",
  "k": "attn_k",
  "v": "attn_v",
  "o": "attn_output",
  "gate": "ffn_gate",
  "up": "ffn_up",
  "down": "ffn_down",
}


def interleaved(x: np.ndarray, w: workloads.Workload) -> np.ndarray:
  """Reorders the outputs of a head: GGUF's Llama turns neighbours."""
  heads = x.reshape(-1, 2, w.head_width // 2, w.width)
  return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(x.shape)


def write(w: workloads.Workload, path: pathlib.Path) -> None:
  """Writes the model as a GGUF file."""
  writer = gguf.GGUFWriter(str(path), "llama")
  writer.add_context_length(w.prompt_len + w.max_tokens)
  writer.add_embedding_length(w.width)
  writer.add_block_count(w.layers)
  writer.add_feed_forward_length(w.ff)
  writer.add_head_count(w.heads)
  writer.add_head_count_kv(w.kv_heads)
  writer.add_rope_dimension_count(w.head_width)
  writer.add_rope_freq_base(w.rope_theta)
  writer.add_layer_norm_rms_eps(w.norm_eps)
  writer.add_vocab_size(w.vocab)
  writer.add_tokenizer_model("no_vocab")
  drawn, ones = workloads.weights(w), np.ones(w.width, np.float32)
  writer.add_tensor("token_embd.weight", drawn["embed"])
  writer.add_tensor("output_norm.weight", ones)
  for index, layer in enumerate(drawn["layers"]):
    for norm in ("attn_norm", "ffn_norm"):
      writer.add_tensor(f"blk.{index}.{norm}.weight", ones)
    for name, of_gguf in _NAMES.items():
      value = interleaved(layer[name], w) if name in "qk" else layer[name]
      writer.add_tensor(f"blk.{index}.{of_gguf}.weight", value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class Model:
  """The model in memory, a cache for every row, and a batch to fill."""

  def __init__(self, w: workloads.Workload) -> None:
    """Writes and loads the model."""
    self._w = w
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, "model.gguf")
      write(w, path)
      self._model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
      )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = w.rows * (w.prompt_len + w.max_tokens)
    params.n_seq_max = w.rows
    params.n_batch = w.rows * w.prompt_len
    params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = workloads.cores()
    params.type_k = params.type_v = _FLOAT32
    self._context = llama_cpp.llama_init_from_model(self._model, params)
    self._memory = llama_cpp.llama_get_memory(self._context)
    self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
    chain = llama_cpp.llama_sampler_chain_default_params()
    self._sampler = llama_cpp.llama_sampler_chain_init(chain)
    for step in (
      llama_cpp.llama_sampler_init_temp(1.0),
      llama_cpp.llama_sampler_init_dist(1),
    ):
      llama_cpp.llama_sampler_chain_add(self._sampler, step)

  def clear(self) -> None:
    """Forgets all sequences."""
    llama_cpp.llama_memory_clear(self._memory, False)

  def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
    """Runs tokens, each with its position, row, and whether to predict."""
    batch = self._batch
    for i, (token, position, row, predicts) in enumerate(tokens):
      batch.token[i], batch.pos[i] = token, position
      batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
      batch.logits[i] = predicts
    batch.n_tokens = len(tokens)
    if llama_cpp.llama_decode(self._context, batch):
      sys.exit("peer_llama_cpp: expected room for the batch, got none.")

  def sample(self, at: int) -> int:
    """Draws the token after the one at an index of the batch."""
    return llama_cpp.llama_sampler_sample(self._sampler, self._context, at)

  def logits(self, at: int) -> np.ndarray:
    """Returns the logits behind an index of the batch."""
    found = llama_cpp.llama_get_logits_ith(self._context, at)
    return np.ctypeslib.as_array(found, (self._w.vocab,)).astype(np.float64)

  def share(self, source: int, row: int) -> None:
    """Gives a row the keys and values of another one."""
    llama_cpp.llama_memory_seq_cp(self._memory, source, row, -1, -1)


def check(w: workloads.Workload, model: Model) -> float:
  """Returns the log-probability of the checked sequence."""
  ids = workloads.checked(w)
  model.decode([(token, i, 0, True) for i, token in enumerate(ids)])
  found = 0.0
  for i, token in enumerate(ids[1:]):
    z = model.logits(i)
    found += z[token] - z.max() - np.log(np.exp(z - z.max()).sum())
  return float(found)


def rollout(
  w: workloads.Workload,
  model: Model,
  prompts: list[list[int]],
  lengths: list[int],
) -> list[list[int]]:
  """Samples completions of given lengths, in the order of the prompts."""
  model.clear()
  last = w.prompt_len - 1
  model.decode(
    [
      (token, i, number * w.group, i == last)
      for number, prompt in enumerate(prompts)
      for i, token in enumerate(prompt)
    ]
  )
  made: list[list[int]] = []
  for row in range(w.rows):
    number = row // w.group
    made.append([model.sample(number * w.prompt_len + last)])
    if row % w.group:
      model.share(number * w.group, row)
  live = list(range(w.rows))
  while live := [row for row in live if len(made[row]) < lengths[row]]:
    model.decode([(made[r][-1], last + len(made[r]), r, True) for r in live])
    for i, row in enumerate(live):
      made[row].append(model.sample(i))
  return made


def main() -> None:
  """Reads the command line and serves."""
  w = workloads.WORKLOADS[sys.argv[1]]
  callback: Any = llama_cpp.llama_log_callback(lambda *_: None)
  llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
  model = Model(w)
  workloads.serve(
    w,
    lambda step, prompts: rollout(
      w, model, prompts, workloads.lengths(w, step)
    ),
    check=check(w, model),
    version=f"llama-cpp-python {llama_cpp.__version__}",
  )


if __name__ == "__main__":
  main()
