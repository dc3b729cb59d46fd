"""A policy from scratch learns to use a calculator, in two turns.

It is asked for a difference, `347-341>`. The first turn is to call the
calculator, `[347-341]`, which answers `6=`; the second is to say the result. A
short supervised warm-up shows what a call looks like, and nothing of what comes
after it. Everything is a token a character, on two virtual CPU devices. On two
x86-64 cores that had other work too: five minutes, from none of 256 held-out
questions right, greedily, to all.
"""

import random
import re
from collections.abc import Sequence

from jaxrl_post import config, types
from jaxrl_post.algos import grpo
from jaxrl_post.data import dataset, sources, tool_calls
from jaxrl_post.envs import evaluate, multi_turn, tools
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim, warmup

_LETTERS = "0123456789-[]>=?"
_PROMPT = len("347-341>")
# A call, its answer and the result, with the end of either turn.
_TOKENS = len("[347-341].6=6.")
_HELD_OUT = 10_000_000


def make(index: int) -> types.Example:
  """Makes the example of an index: numbers whose difference is one digit.

  Training and held-out examples never share a question: the remainder of the
  first number by 5 decides which of the two it may be.
  """
  draw = random.Random(index)
  held_out = index >= _HELD_OUT
  while True:
    first = draw.randrange(110, 1000)
    if (first % 5 == 0) == held_out:
      break
  question = f"{first}-{first - draw.randrange(10)}"
  return types.Example(prompt=f"{question}>", reference=f"[{question}]")


def subtract(expression: str) -> str:
  """Calculates, and says where the result ends."""
  return f"{tools.calculate(expression)}="


def calls(text: str) -> Sequence[tool_calls.Call | tool_calls.Malformed]:
  """Reads the calls of a turn: what is in square brackets."""
  if "[" not in text:
    return ()
  found = re.fullmatch(r"\[([^\[\]]*)\]", text)
  if not found:
    return (tool_calls.Malformed(text, "expected a call and nothing else"),)
  return (tool_calls.Call("subtract", {"expression": found[1]}),)


def calculator() -> tools.Tools:
  """Makes the environment."""
  tool = tools.Tool(
    function=subtract,
    name="subtract",
    description="Calculates an expression.",
    parameters=tools.calculator().parameters,
  )
  return tools.Tools((tool,), style=calls, failure="?=")


def score(rollout: types.Rollout, reference: str) -> dict[str, float]:
  """Scores 1 for the right result, plus the share of its digits in place."""
  first, second = map(int, reference.strip("[]").split("-"))
  answer, text = str(first - second), rollout.text
  right = sum(a == b for a, b in zip(text, answer, strict=False))
  return {
    "exact": float(text == answer),
    "in_place": right / max(len(text), len(answer)),
  }


def get_config() -> config.Run:
  """The demo of tools."""
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ff_width=256,
        vocab_size=len(_LETTERS) + 2,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=20_000),
      held_out=sources.Generated(make, size=256, start=_HELD_OUT),
      alphabet=_LETTERS,
      max_prompt=_PROMPT,
    ),
    env=multi_turn.Conversation(
      environment=calculator,
      max_turns=2,
      workers=2,
    ),
    rewards=pool.Rewards(functions=(score,), batch=64),
    algo=grpo.objective(),
    optim=optim.Optim(learning_rate=1e-3, schedule="linear"),
    sampling=engine.Sampling(max_tokens=_TOKENS + 4, rows=256, block=8),
    placement=mesh.Placement(mode="split", cpu_devices=2),
    evaluation=evaluate.Evaluation(every=50),
    checkpoint=checkpoint.Checkpoint(every=50),
    warmup=warmup.Warmup(num_steps=45, learning_rate=5e-3),
    num_steps=100,
    groups_per_step=32,
    group_size=8,
    max_lag=1,
  )
