"""All that a stream holds between two blocks, for checkpoints.

A cut belongs to the weights of its ledger's step: with them it is a point that
the run has passed as a whole, from which it can go on. Prompts are not in it;
their uids draw them again from the same data.
"""

import dataclasses
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import ledger_json, restore

# Names of the files that `to_files` makes.
_TEXT, _ARRAYS = "stream.json", "stream.npz"
# What reading them can raise if they are not as they were written.
_DAMAGE = (LookupError, TypeError, ValueError, EOFError, zipfile.BadZipFile)


@dataclasses.dataclass
class Counters:
  """What the stream has made since the run began.

  Attributes:
    generated: rollouts whose completion ended.
    sampled_tokens: in these.
    left_in_step: groups that left untrained since the newest batch.
    always: prompts that every rollout solves, to the pool, if there is one.
    never: prompts that none solves, likewise.
    levels: of `curriculum.sums`, if there is a curriculum.
  """

  generated: int = 0
  sampled_tokens: int = 0
  left_in_step: int = 0
  always: int = 0
  never: int = 0
  levels: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


@types.host_record
class Open:
  """A group that has not left: each of its completions is in one state.

  Attributes:
    uid: of its prompt.
    begun: half made; those in no state here are not begun.
    sampled: ended, not scored.
    scored: rollouts with their rewards.
  """

  uid: int
  begun: tuple[types.Partial, ...]
  sampled: tuple[types.Completion, ...]
  scored: tuple[types.Rollout, ...]


@types.host_record
class Cut:
  """The state of a stream.

  Attributes:
    ledger: where every group is.
    frontier: which draws have left.
    groups: those of the ledger, in order of admission.
    steps: newest ledger version of each policy version that a token may have.
    counters: what was made so far.
    events: events so far.
  """

  ledger: ledgers.Ledger
  frontier: frontiers.Frontier
  groups: tuple[Open, ...]
  steps: Mapping[int, int]
  counters: Counters
  events: int


def to_files(cut: Cut) -> dict[str, bytes]:
  """Returns the cut as a JSON text and an npz of arrays, by file name.

  The arrays `tokens`, `logprobs` and `versions` are those of all completions
  after each other, in the order of the text, which has their lengths; `routing`
  likewise, flat, if they have it, and the text its shapes.
  """
  parts: list[types.Partial | types.Completion] = []
  groups = []
  for group in cut.groups:
    ended = [rollout.completion for rollout in group.scored]
    parts += [*group.begun, *group.sampled, *ended]
    groups.append(
      {
        "uid": group.uid,
        "begun": [_begun(partial) for partial in group.begun],
        "sampled": [_ended(completion) for completion in group.sampled],
        "scored": [_scored(rollout) for rollout in group.scored],
      }
    )
  text = {
    "ledger": ledger_json.to_json(cut.ledger),
    "frontier": frontiers.to_json(cut.frontier),
    "groups": groups,
    "steps": [[version, step] for version, step in cut.steps.items()],
    "counters": dataclasses.asdict(cut.counters),
    "events": cut.events,
  }
  arrays: dict[str, Any] = {
    "tokens": _joined((part.tokens for part in parts), np.int32),
    "logprobs": _joined((part.logprobs for part in parts), np.float32),
    "versions": _joined((part.versions for part in parts), np.int32),
  }
  file = io.BytesIO()
  np.savez(file, **arrays, **_routing(parts))
  return {_TEXT: json.dumps(text).encode(), _ARRAYS: file.getvalue()}


def from_files(
  files: Mapping[str, bytes],
  *,
  prompts: prompt_sets.Prompts,
  rollout: Callable[[types.Prompt, types.Completion], types.Rollout],
) -> Cut:
  """Reads what `to_files` wrote.

  Args:
    files: content by name; others are not looked at.
    prompts: of the run.
    rollout: joins a prompt and a completion.

  Returns:
    The cut that was written, bit for bit.

  Raises:
    RunError: a file is missing or damaged.
  """
  try:
    text = json.loads(files[_TEXT])
    with np.load(io.BytesIO(files[_ARRAYS]), allow_pickle=False) as arrays:
      pieces = _Pieces(arrays)
    groups = tuple(
      _group(data, pieces, prompts, rollout) for data in text["groups"]
    )
    pieces.check_used()
    return Cut(
      ledger=ledger_json.from_json(text["ledger"]),
      frontier=frontiers.from_json(text["frontier"]),
      groups=groups,
      steps={int(version): int(step) for version, step in text["steps"]},
      counters=Counters(**text["counters"]),
      events=int(text["events"]),
    )
  except _DAMAGE as error:
    raise types.RunError(
      f"checkpoint: expected the stream as it was saved, got {error!r}. Resume "
      "from another checkpoint."
    ) from error


class _Pieces:
  """Hands out the arrays piece by piece."""

  def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
    self._arrays = [arrays[n] for n in ("tokens", "logprobs", "versions")]
    self._routing = arrays.get("routing")
    self._at = self._routed = 0
    if len({len(array) for array in self._arrays}) != 1:
      raise ValueError("arrays of unequal lengths")

  def next(self, length: int) -> list[tuple]:
    end = self._at + length
    if not 0 <= self._at <= end <= len(self._arrays[0]):
      raise ValueError("arrays that are too short")
    pieces = [tuple(a[self._at : end].tolist()) for a in self._arrays]
    self._at = end
    return pieces

  def routing(self, shape: Sequence[int] | None) -> np.ndarray | None:
    if shape is None:
      return None
    if self._routing is None:
      raise ValueError("no routing")
    end = self._routed + math.prod(shape)
    piece = self._routing[self._routed : end].reshape(shape)
    self._routed = end
    return piece

  def check_used(self) -> None:
    rest = 0 if self._routing is None else len(self._routing) - self._routed
    if rest or self._at != len(self._arrays[0]):
      raise ValueError("arrays that are too long")


def _group(
  data: Mapping[str, Any],
  pieces: _Pieces,
  prompts: prompt_sets.Prompts,
  rollout: Callable[[types.Prompt, types.Completion], types.Rollout],
) -> Open:
  begun = [_partial(one, pieces) for one in data["begun"]]
  sampled = [_completion(one, pieces) for one in data["sampled"]]
  prompt = prompts[data["uid"]]
  scored = [
    dataclasses.replace(
      rollout(prompt, _completion(one, pieces)),
      reward=math.nan if one["reward"] is None else float(one["reward"]),
      parts=one["parts"],
      failure=one["failure"],
    )
    for one in data["scored"]
  ]
  return Open(
    uid=prompt.uid,
    begun=tuple(begun),
    sampled=tuple(sampled),
    scored=tuple(scored),
  )


def _partial(data: Mapping[str, Any], pieces: _Pieces) -> types.Partial:
  tokens, logprobs, versions = pieces.next(data["length"])
  talk = data["talk"]
  if talk is not None:
    talk = restore.Kept(**{**talk, "turns": _turns(talk["turns"])})
  return types.Partial(
    uid=data["uid"],
    tokens=tokens,
    logprobs=logprobs,
    versions=versions,
    talk=talk,
  )


def _completion(data: Mapping[str, Any], pieces: _Pieces) -> types.Completion:
  tokens, logprobs, versions = pieces.next(data["length"])
  return types.Completion(
    uid=data["uid"],
    tokens=tokens,
    logprobs=logprobs,
    versions=versions,
    finish=data["finish"],
    turns=_turns(data["turns"]),
    routing=pieces.routing(data.get("routing")),
    segments=tuple(
      (int(begin), tuple(prompt)) for begin, prompt in data.get("segments", ())
    ),
  )


def _turns(data: Iterable[Mapping[str, Any]]) -> tuple[types.Turn, ...]:
  return tuple(types.Turn(**turn) for turn in data)


def _shape(part: types.Partial | types.Completion) -> dict[str, Any]:
  return {"uid": part.uid, "length": len(part.tokens)}


def _begun(partial: types.Partial) -> dict[str, Any]:
  talk = partial.talk
  kept = None if talk is None else dataclasses.asdict(talk)
  return {**_shape(partial), "talk": kept}


def _ended(completion: types.Completion) -> dict[str, Any]:
  turns = [dataclasses.asdict(turn) for turn in completion.turns]
  ended = {**_shape(completion), "finish": completion.finish, "turns": turns}
  if completion.segments:
    ended["segments"] = completion.segments
  if completion.routing is not None:
    ended["routing"] = completion.routing.shape
  return ended


def _scored(rollout: types.Rollout) -> dict[str, Any]:
  return {
    **_ended(rollout.completion),
    # JSON has no NaN.
    "reward": rollout.reward if math.isfinite(rollout.reward) else None,
    "parts": dict(rollout.parts),
    "failure": rollout.failure,
  }


def _routing(
  parts: Sequence[types.Partial | types.Completion],
) -> dict[str, Any]:
  """Returns the experts of completions; half made ones have none."""
  ended = [part for part in parts if isinstance(part, types.Completion)]
  found = [c.routing.reshape(-1) for c in ended if c.routing is not None]
  return {"routing": np.concatenate(found)} if found else {}


def _joined(pieces: Iterable[Sequence], dtype: type) -> np.ndarray:
  return np.asarray([x for piece in pieces for x in piece], dtype)
