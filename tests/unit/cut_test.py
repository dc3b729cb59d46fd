"""Cuts: what a stream holds, written and read without a bit of difference."""

import dataclasses
import io
import math

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts, sources
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import single_turn

ENV = single_turn.SingleTurn(3, types.SamplingParams(), str)


class Letters:
  """A tokenizer of one token a letter."""

  def prompt_ids(self, prompt):
    return [ord(x) for x in prompt], prompt


PROMPTS = prompts.load(
  sources.Generated(lambda i: types.Example(prompt="a", reference=i), 4),
  Letters(),
  max_tokens=4,
  seed=0,
  epochs=1,
)


def pieces(uid: int, count: int) -> dict:
  logprobs = np.random.default_rng(uid).normal(size=count).astype(np.float32)
  return {
    "uid": uid,
    "tokens": tuple(range(uid, uid + count)),
    "logprobs": tuple(logprobs.tolist()),
    "versions": tuple(i % 3 for i in range(count)),
  }


def rollout(uid: int, **score) -> types.Rollout:
  completion = types.Completion(**pieces(uid, 4), finish="stop")
  made = ENV.rollout(PROMPTS[uid // 3], completion)
  fields = {name: getattr(made, name) for name in made.__slots__}
  return types.Rollout(**{**fields, **score})


@pytest.fixture(name="cut")
def _cut() -> cuts.Cut:
  book = ledgers.start(1, 2)
  for event in (
    ledgers.Admit(0),
    ledgers.Admit(1),
    ledgers.Admit(3),
    ledgers.Block(0, 12, 0),
    ledgers.Finish(0),
  ):
    book = ledgers.apply(book, event)
  return cuts.Cut(
    ledger=book,
    frontier=frontiers.Frontier(first=0, done=frozenset({2})),
    groups=(
      cuts.Open(
        uid=0,
        begun=(),
        sampled=(types.Completion(**pieces(2, 3), finish="length"),),
        scored=(
          rollout(0, reward=0.1, parts={"a": 1 / 3}),
          rollout(1, failure="raised"),
        ),
      ),
      cuts.Open(
        uid=1,
        begun=(types.Partial(**pieces(4, 2)), types.Partial(**pieces(5, 7))),
        sampled=(),
        scored=(),
      ),
      cuts.Open(uid=3, begun=(), sampled=(), scored=()),
    ),
    steps={0: 0, 1: 2},
    counters=cuts.Counters(generated=3, sampled_tokens=11, left_in_step=1),
    events=5,
  )


def read(files: dict[str, bytes]) -> cuts.Cut:
  return cuts.from_files(files, prompts=PROMPTS, rollout=ENV.rollout)


def test_what_is_written_is_read(cut):
  again = read(cuts.to_files(cut))
  # NaN is not equal to itself.
  failed = again.groups[0].scored[1]
  assert math.isnan(failed.reward) and failed.failure == "raised"
  assert repr(again) == repr(cut)
  assert again.groups[1] == cut.groups[1]
  assert again.ledger == cut.ledger


def routed(made: types.Completion, seed: int) -> types.Completion:
  draw = np.random.default_rng(seed)
  shape = (len(made.tokens) + 1 - 1, 3, 2)  # The prompt has one token.
  routing = draw.integers(0, 100, shape).astype(np.int8)
  return dataclasses.replace(made, routing=routing)


@pytest.fixture(name="with_experts")
def _with_experts(cut):
  """All that has ended has its experts; what is half made has none."""
  first, *others = cut.groups
  first = dataclasses.replace(
    first,
    sampled=tuple(routed(made, 0) for made in first.sampled),
    scored=tuple(
      dataclasses.replace(r, completion=routed(r.completion, i))
      for i, r in enumerate(first.scored, 1)
    ),
  )
  return dataclasses.replace(cut, groups=(first, *others))


def test_experts_of_tokens_are_read_back(with_experts):
  written, again = with_experts.groups[0], read(cuts.to_files(with_experts))
  assert again.groups[1] == with_experts.groups[1]
  for one, other in zip(
    (*written.sampled, *(r.completion for r in written.scored)),
    (*again.groups[0].sampled, *(r.completion for r in again.groups[0].scored)),
    strict=True,
  ):
    assert other == one and other.routing.dtype == np.int8
    np.testing.assert_array_equal(other.routing, one.routing)


@pytest.mark.parametrize("change", ["gone", "shorter", "longer"])
def test_experts_that_do_not_fit_are_damage(with_experts, change):
  files = cuts.to_files(with_experts)
  with np.load(io.BytesIO(files["stream.npz"])) as file:
    arrays = dict(file)
  routing = arrays.pop("routing")
  if change == "shorter":
    arrays["routing"] = routing[:-1]
  elif change == "longer":
    arrays["routing"] = np.append(routing, routing[:1])
  out = io.BytesIO()
  np.savez(out, **arrays)
  with pytest.raises(types.RunError, match="the stream as it was saved"):
    read({**files, "stream.npz": out.getvalue()})


def test_the_arrays_can_be_read_without_the_package(cut, tmp_path):
  (tmp_path / "stream.npz").write_bytes(cuts.to_files(cut)["stream.npz"])
  with np.load(tmp_path / "stream.npz", allow_pickle=False) as arrays:
    assert {name: array.dtype for name, array in arrays.items()} == {
      "tokens": np.int32,
      "logprobs": np.float32,
      "versions": np.int32,
    }
    assert {len(array) for array in arrays.values()} == {3 + 4 + 4 + 2 + 7}


@pytest.mark.parametrize(
  "damage",
  [
    lambda files: files.pop("stream.npz"),
    lambda files: files.update({"stream.npz": files["stream.npz"][:-30]}),
    lambda files: files.update({"stream.npz": b""}),
    lambda files: files.update({"stream.json": b"{}"}),
    lambda files: files.update({"stream.json": b"["}),
    lambda files: files.update(
      {"stream.json": files["stream.json"].replace(b'": 7', b'": 8')}
    ),
    lambda files: files.update(
      {"stream.json": files["stream.json"].replace(b'"uid": 3', b'"uid": 9')}
    ),
  ],
)
def test_damage_is_refused(cut, damage):
  files = cuts.to_files(cut)
  damage(files)
  with pytest.raises(types.RunError, match="expected"):
    read(files)
