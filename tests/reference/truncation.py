"""What min-p, top-k and top-p leave, token by token."""


def allowed(probs, top_k, top_p, min_p):
  """Returns the ids that are left, from the most probable one on."""
  kept, before = set(), 0.0
  order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
  for rank, token in enumerate(order):
    fits = probs[token] > 0 and before < top_p * probs.sum()
    fits &= top_k == 0 or rank < top_k
    if fits and probs[token] >= min_p * probs.max():
      kept.add(token)
    before += probs[token] if top_p < 1 else 0.0
  return kept
