"""Generation by transformers on a workload, for bench/rollout.py.

    echo 0 | PYTHON bench/peer_torch.py W1 [--continuous]

Runs in an environment with torch and transformers. `model.generate` is what
TRL's trainers call to sample; --continuous is transformers' own continuous
batching, which they can be told to call instead.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
import workloads

_PAGE = 64
_PATHS = {
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}


def build(w: workloads.Workload) -> transformers.LlamaForCausalLM:
  """Builds the model and gives it the weights, all of them."""
  config = transformers.LlamaConfig(
    vocab_size=w.vocab,
    hidden_size=w.width,
    intermediate_size=w.ff,
    num_hidden_layers=w.layers,
    num_attention_heads=w.heads,
    num_key_value_heads=w.kv_heads,
    head_dim=w.head_width,
    rms_norm_eps=w.norm_eps,
    rope_parameters={"rope_type": "default", "rope_theta": w.rope_theta},
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=workloads.PAD_ID,
    attn_implementation="sdpa",
  )
  model = transformers.LlamaForCausalLM(config).eval()
  drawn = workloads.weights(w)
  # Norms start as ones.
  wanted = {"model.embed_tokens.weight": drawn["embed"]}
  for index, layer in enumerate(drawn["layers"]):
    for name, path in _PATHS.items():
      wanted[f"model.layers.{index}.{path}.weight"] = layer[name]
  with torch.no_grad():
    for path, value in wanted.items():
      model.get_parameter(path).copy_(torch.from_numpy(value))
  return model


def check(w: workloads.Workload, model: transformers.LlamaForCausalLM) -> float:
  """Returns the log-probability of the checked sequence."""
  ids = torch.tensor([workloads.checked(w)])
  with torch.no_grad():
    logits = model(input_ids=ids).logits[0, :-1]
  scores = torch.log_softmax(logits, -1)
  return float(scores.gather(-1, ids[0, 1:, None]).sum())


def _config(
  w: workloads.Workload, no_end: int | None
) -> transformers.GenerationConfig:
  return transformers.GenerationConfig(
    max_new_tokens=w.max_tokens,
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    pad_token_id=workloads.PAD_ID,
    eos_token_id=list(w.end_ids) or no_end,
  )


def whole_batch(
  w: workloads.Workload, model: Any
) -> Callable[[int, list[list[int]]], list[list[int]]]:
  """Samples all rows until the last one ends."""
  config, ends = _config(w, None), set(w.end_ids)

  def cut(ids: list[int]) -> list[int]:
    stops = (i + 1 for i, token in enumerate(ids) if token in ends)
    return ids[: next(stops, len(ids))]

  def generate(_: int, prompts: list[list[int]]) -> list[list[int]]:
    ids = torch.tensor(prompts).repeat_interleave(w.group, dim=0)
    out = model.generate(
      input_ids=ids,
      attention_mask=torch.ones_like(ids),
      generation_config=config,
    )
    return [cut(row) for row in out[:, w.prompt_len :].tolist()]

  return generate


def continuous(
  w: workloads.Workload, model: Any
) -> Callable[[int, list[list[int]]], list[list[int]]]:
  """Samples rows that leave the batch when they end."""
  pages = -(-(w.prompt_len + w.max_tokens) // _PAGE)
  batching = transformers.ContinuousBatchingConfig(
    page_size=_PAGE,
    num_blocks=w.rows * pages + w.prompts,
    max_batch_tokens=w.rows * w.prompt_len,
    max_requests_per_batch=w.rows,
    use_cuda_graph=False,
    use_async_batching=False,
    seed=1,
  )
  config = _config(w, -1)

  def generate(_: int, prompts: list[list[int]]) -> list[list[int]]:
    # The manager outlives the call: a new one costs its set-up again.
    manages = model.continuous_batching_context_manager(
      generation_config=config,
      continuous_batching_config=batching,
      persistent_manager=True,
    )
    made: dict[str, list[int]] = {}
    with manages as manager:
      asked = [
        manager.add_request(ids, max_new_tokens=w.max_tokens)
        for ids in prompts
        for _ in range(w.group)
      ]
      while len(made) < len(asked):
        result = manager.get_result(timeout=5)
        if result is None and manager.is_running():
          continue
        if result is None or result.error is not None:
          why = "the thread ended" if result is None else result.error
          sys.exit(f"peer_torch: expected {len(asked)} results: {why}.")
        if result.is_finished():
          made[result.request_id] = list(result.generated_tokens)
    return [made[name] for name in asked]

  return generate


def version() -> str:
  """Says what is measured."""
  return f"transformers {transformers.__version__}, torch {torch.__version__}"


def started(w: workloads.Workload) -> transformers.LlamaForCausalLM:
  """Returns the model, and has torch use the cores that are granted."""
  torch.set_num_threads(workloads.cores())
  transformers.utils.logging.set_verbosity_error()
  return build(w)


def main() -> None:
  """Reads the command line and serves."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("workload", choices=sorted(workloads.WORKLOADS))
  parser.add_argument("--continuous", action="store_true")
  chosen = parser.parse_args()
  w = workloads.WORKLOADS[chosen.workload]
  model = started(w)
  torch.manual_seed(1)
  make = continuous if chosen.continuous else whole_batch
  with torch.no_grad():
    workloads.serve(w, make(w, model), check=check(w, model), version=version())


if __name__ == "__main__":
  main()
