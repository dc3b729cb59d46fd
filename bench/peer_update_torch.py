"""A GRPO update by torch and transformers, for bench/update.py.

    echo 0 | PYTHON bench/peer_update_torch.py W1 [--rows N]

Runs in an environment with torch and transformers. What TRL's GRPO trainer does
with a batch, without what surrounds it: a forward and a backward pass of each
microbatch with logits of completions only, the clipped loss, a bound on the
norm of the gradient, and fused AdamW. TRL also computes entropies for its log
and pads every microbatch to the longest completion of the batch; this does not.
"""

from collections.abc import Callable

import numpy as np
import peer_torch
import scored
import torch
import transformers
import workloads


def updater(
  w: workloads.Workload,
  model: transformers.LlamaForCausalLM,
  rows: int,
) -> Callable[[scored.Batch], None]:
  """Returns an update by microbatches of some rows."""
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=scored.LEARNING_RATE,
    weight_decay=0.0,
    fused=True,
  )

  def loss(batch: scored.Batch, part: slice, gains: torch.Tensor):
    made = batch.completions[part]
    longest = max(map(len, made))
    # Nothing attends to padding on the right, so that no mask is needed.
    ids = np.full((len(made), w.prompt_len + longest), workloads.PAD_ID)
    mask = np.zeros((len(made), longest), np.float32)
    for row, (prompt, tokens) in enumerate(
      zip(batch.prompts[part], made, strict=True)
    ):
      ids[row, : w.prompt_len + len(tokens)] = prompt + tokens
      mask[row, : len(tokens)] = 1
    given, counts = torch.from_numpy(ids), torch.from_numpy(mask)
    logits = model(
      input_ids=given, use_cache=False, logits_to_keep=longest + 1
    ).logits[:, :-1]
    targets = given[:, w.prompt_len :, None]
    taken = logits.gather(-1, targets)[..., 0] - logits.logsumexp(-1)
    ratio = torch.exp(taken - taken.detach())
    cut = ratio.clamp(1 - scored.CLIP, 1 + scored.CLIP)
    gain = torch.minimum(ratio * gains[:, None], cut * gains[:, None])
    means = (gain * counts).sum(1) / counts.sum(1)
    return -means.sum() / w.rows

  def update(batch: scored.Batch) -> None:
    gains = torch.from_numpy(batch.advantages(w.group))
    for begin in range(0, w.rows, rows):
      part = slice(begin, begin + rows)
      loss(batch, part, gains[part]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  return update


def main() -> None:
  """Reads the command line and serves."""
  w, chosen = scored.asked(__doc__)
  model = peer_torch.started(w)
  scored.serve(
    w,
    updater(w, model, chosen.rows),
    check=lambda: peer_torch.check(w, model),
    version=peer_torch.version(),
  )


if __name__ == "__main__":
  main()
