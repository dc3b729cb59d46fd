"""Who scores when a reward model does: what waits, what fails, what adds up."""

import concurrent.futures
import dataclasses
import json
import math
import threading

import jax
import numpy as np
import pytest

from jaxrl_post import scorer, types
from jaxrl_post.data import tokenizer
from jaxrl_post.placement import mesh, reward_model, settings
from jaxrl_post.rewards import combine, pool
from jaxrl_post.rewards import model as models
from jaxrl_post.runtime import clock as clocks
from tests.reference import tiny_folder

WAIT_S = 60.0
ASKED = {"role": "user", "content": "hi"}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model") / "judge"
  tiny_folder.write(folder, **tiny_folder.classifier("llama"))
  return folder


def prompt(uid: int = 0, **fields) -> types.Prompt:
  base = {"tokens": (1,), "text": "?", "reference": None, "messages": (ASKED,)}
  return types.Prompt(uid=uid, **(base | fields))


def rollout(uid: int, text: str = "") -> types.Rollout:
  completion = types.Completion(
    uid=uid, tokens=(), logprobs=(), versions=(), finish="stop"
  )
  return types.Rollout(
    prompt=prompt(uid // 4), completion=completion, temperature=1.0, text=text
  )


def source_of(folder, **options) -> reward_model.Source:
  made = {"weight": 0.5, "name": "judge", "batch": 3, "max_tokens": 128}
  cfg = models.Model(path=str(folder), **(made | options))
  found = reward_model.read(cfg, mesh.Placement(), (), talks=False)
  assert found is not None
  return found


class Device:
  """Stands for the model: a number is the length of the conversation."""

  def __init__(self, value=float) -> None:
    self.calls: list[tuple[list[int], int]] = []
    self.value, self.free = value, threading.Event()
    self.free.set()
    self.reads = threading.Event()

  def score(self, conversations, length):
    if conversations:
      self.calls.append(([len(ids) for ids in conversations], length))
      self.reads.set()
      assert self.free.wait(WAIT_S)
    numbers = [self.value(len(ids)) for ids in conversations]
    return np.asarray([*numbers, 77.0, 78.0, 79.0], np.float32)


class Functions:
  """Stands for a pool, which answers when it is told to."""

  def __init__(self) -> None:
    self.asked: list[tuple[types.Rollout, concurrent.futures.Future]] = []

  def submit_all(self, rollouts):
    made = [(one, concurrent.futures.Future()) for one in rollouts]
    self.asked += made
    return [future for _, future in made]


def judged(source, device, functions=None, on_failure="stop"):
  placed = reward_model.Placed(
    reward_model.lengths(source.cfg.max_tokens), device.score
  )
  return scorer.Judged(
    source,
    placed,
    functions,
    on_failure=on_failure,
    clock=clocks.Clock(("generation", "training")),
  )


def results(futures):
  return [future.result(timeout=WAIT_S) for future in futures]


def written(rollout: types.Rollout) -> int:
  """Returns the length of a conversation: one id a byte or special token."""
  return len("Suser\nhiE\nSassistant\nE\n") + len(rollout.text)


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize(
  ("most", "wanted"),
  [
    (3, (3,)),
    (64, (64,)),
    (127, (64, 127)),
    (126, (126,)),
    (200, (100, 200)),
    (1024, (128, 256, 512, 1024)),
    (40001, (5001, 10001, 20001, 40001)),
  ],
)
def test_conversations_are_padded_to_a_few_lengths(most, wanted):
  assert reward_model.lengths(most) == wanted


def test_a_conversation_is_in_the_words_of_the_model(folder, tmp_path):
  backend = tiny_folder.byte_tokenizer()
  said = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
  ids = tuple(backend.encode(said, add_special_tokens=False).ids)
  assert source_of(folder).conversation(prompt(), "yo") == ids
  system = {"role": "system", "content": "Be kind."}
  longer = prompt(messages=(system, ASKED))
  before = "<|im_start|>system\nBe kind.<|im_end|>\n"
  more = tuple(backend.encode(before, add_special_tokens=False).ids)
  assert source_of(folder).conversation(longer, "yo") == more + ids
  # Where texts begin with a token, it is there once, whoever writes it.
  for template in (tiny_folder.CHATML, "{{ bos_token }}" + tiny_folder.CHATML):
    options = tiny_folder.classifier("llama")
    tiny_folder.write(tmp_path, bos=True, template=template, **options)
    assert source_of(tmp_path).conversation(prompt(), "yo") == (0, *ids)


def test_without_a_template_there_is_no_conversation():
  plain = tokenizer.characters("ab")
  with pytest.raises(types.InputError, match="with a chat template, got none"):
    plain.conversation_ids((ASKED,))


# --------------------------------------------------------------------- programs


def test_one_program_reads_what_waits_whichever_group_it_is_of(folder):
  device = Device()
  texts = ["a" * n for n in (0, 1, 90, 2, 3, 4, 80, 5)]
  rollouts = [rollout(uid, text) for uid, text in enumerate(texts)]
  with judged(source_of(folder), device) as judge:
    device.free.clear()
    first = judge.submit_all(rollouts[:1])
    assert device.reads.wait(WAIT_S)
    rest = judge.submit_all(rollouts[1:5]) + judge.submit_all(rollouts[5:])
    device.free.set()
    made = results(first + rest)
  lengths = [written(one) for one in rollouts]
  assert [one.parts["judge"] for one in made] == lengths
  assert [one.completion.uid for one in made] == list(range(8))
  a, *others = lengths
  near, far = [n for n in others if n <= 64], [n for n in others if n > 64]
  # The one that waited longest goes first, with those of its length.
  assert device.calls == [
    ([a], 64),
    (near[:3], 64),
    (far, 128),
    (near[3:], 64),
  ]


def test_functions_and_model_add_up_whoever_is_first(folder):
  functions, device = Functions(), Device()
  with judged(source_of(folder), device, functions) as judge:
    device.free.clear()
    early, late = judge.submit_all([rollout(0), rollout(1)])
    (one, asked), (two, other) = functions.asked
    asked.set_result(combine.combine(one, [combine.read("f", 2.0)], [1.0]))
    device.free.set()
    first = early.result(WAIT_S)
    assert not late.done()
    other.set_result(combine.combine(two, [combine.read("f", None)], [1.0]))
    second = late.result(WAIT_S)
  number = written(rollout(0))
  assert first.parts == {"f": 2.0, "judge": number}
  assert first.reward == 2.0 + 0.5 * number and first.failure == ""
  assert math.isnan(second.reward) and second.failure == "no reward: None"
  assert second.parts == {"judge": number}


def test_what_a_function_raises_and_a_name_that_is_taken_reach_who_waits(
  folder,
):
  functions = Functions()
  with judged(source_of(folder), Device(), functions) as judge:
    raised, clash = judge.submit_all([rollout(0), rollout(1)])
    functions.asked[0][1].set_exception(ValueError("boom"))
    said = combine.combine(rollout(1), [combine.read("judge", 1.0)], [1.0])
    functions.asked[1][1].set_result(said)
    with pytest.raises(ValueError, match="boom"):
      raised.result(WAIT_S)
    with pytest.raises(types.InputError, match="rewards.model.name: .*'judge'"):
      clash.result(WAIT_S)


# --------------------------------------------------------------------- failures


def failing(case: str):
  """Returns a rollout and a device that make a failure, and its words."""
  if case == "long":
    return rollout(5, "a" * 200), Device(), r"of 223 tokens, at most 128 tokens"
  return rollout(5), Device(lambda _: math.inf), "inf"


@pytest.mark.parametrize("case", ["long", "infinite"])
def test_a_failure_ends_the_run_or_is_what_the_policy_says(folder, case):
  one, device, words = failing(case)
  source = source_of(folder)
  with judged(source, device) as judge:
    (stopped,) = judge.submit_all([one])
    with pytest.raises(types.RunError, match=words) as error:
      stopped.result(WAIT_S)
  assert str(error.value).startswith("reward judge, rollout 5: expected")
  assert "\n" not in str(error.value)
  with judged(source, device, on_failure="mask") as judge:
    (masked,) = results(judge.submit_all([one]))
  assert math.isnan(masked.reward) and masked.parts == {}
  assert words.split()[0] in masked.failure
  with judged(source, device, on_failure=-2.0) as judge:
    (stands,) = results(judge.submit_all([one]))
  assert stands.reward == -1.0 and stands.parts == {"judge": -2.0}
  assert stands.failure == masked.failure
  assert device.calls == [] or case == "infinite"  # Nothing is ever cut off.


def test_nan_is_no_reward_whatever_the_policy(folder):
  with judged(source_of(folder), Device(lambda _: math.nan)) as judge:
    (made,) = results(judge.submit_all([rollout(0)]))
  assert math.isnan(made.reward) and made.failure == "no reward: nan"


def test_a_fault_of_the_device_reaches_all_who_wait(folder):
  device = Device(lambda _: 1 / 0)
  with judged(source_of(folder), device) as judge:
    for future in judge.submit_all([rollout(uid) for uid in range(5)]):
      with pytest.raises(ZeroDivisionError):
        future.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
      judge.submit_all([rollout(9)])


def test_nobody_waits_for_a_model_that_was_closed(folder):
  functions = Functions()
  judge = judged(source_of(folder), Device(), functions)
  with pytest.raises(types.RunError, match="outside of its `with` block"):
    judge.submit_all([rollout(0)])
  with judge:
    (late,) = judge.submit_all([rollout(0)])
  with pytest.raises(types.RunError, match="closed before"):
    late.result(WAIT_S)
  functions.asked[0][1].set_result(rollout(0))  # Of no use any more.
  with pytest.raises(types.RunError, match="closed before"):
    judge.submit_all([rollout(1)])


def test_a_template_that_refuses_is_the_users_mistake(tmp_path):
  strict = (
    "{% if messages|length > 2 %}{{ raise_exception('two!') }}{% endif %}"
  )
  options = tiny_folder.classifier("llama")
  tiny_folder.write(tmp_path, template=strict + tiny_folder.CHATML, **options)
  three = prompt(messages=(ASKED, ASKED))
  with judged(source_of(tmp_path), Device()) as judge:
    bad = dataclasses.replace(rollout(0), prompt=three)
    refused, fine = judge.submit_all([bad, rollout(1)])
    assert fine.result(WAIT_S).parts
    with pytest.raises(types.InputError, match="two!"):
      refused.result(WAIT_S)
  cfg = models.Model(path=str(tmp_path), max_tokens=64)
  with pytest.raises(types.InputError, match="two!"):
    reward_model.read(cfg, mesh.Placement(), [three], talks=False)


# -------------------------------------------------------------------- adding up


@pytest.mark.parametrize(
  ("before", "said", "reward", "failure"),
  [
    (1.0, combine.Score(parts={"m": 3.0}), 7.0, ""),
    (math.nan, combine.Score(parts={"m": 3.0}), math.nan, "mine"),
    (1.0, combine.Score(missing="nan"), math.nan, "no reward: nan"),
    (math.nan, combine.Score(fault="late"), math.nan, "mine"),
    (1.0, combine.Score(parts={"m": 0.0}, replaced="late"), 1.0, "late"),
  ],
)
def test_one_more_score_is_added_to_a_reward(before, said, reward, failure):
  why = "mine" if math.isnan(before) else ""
  scored = dataclasses.replace(
    rollout(0), reward=before, parts={"f": 5.0}, failure=why
  )
  made = combine.add(scored, said, 2.0)
  np.testing.assert_equal(made.reward, reward)
  assert made.failure == failure
  assert made.parts == {"f": 5.0, **said.parts}


def test_what_was_replaced_before_stays_said():
  scored = dataclasses.replace(rollout(0), reward=0.0, failure="replaced")
  for said, failure in (
    (combine.Score(parts={"m": 1.0}), "replaced"),
    (combine.Score(fault="late"), "late"),
  ):
    assert combine.add(scored, said, 1.0).failure == failure


def test_a_sum_that_is_beyond_all_rewards_is_refused():
  scored = dataclasses.replace(rollout(0), reward=9e14)
  said = combine.Score(parts={"m": 9e14})
  with pytest.raises(types.InputError, match=r"model.weight: .* got 1.8e\+15"):
    combine.add(scored, said, 1.0)


# -------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"path": ""}, "path: expected a folder, got ''"),
    ({"weight": math.inf}, "weight: expected a finite number, got inf"),
    ({"name": ""}, "name: expected 1 to 100 characters"),
    ({"devices": (1, 1)}, "devices: expected distinct indices"),
    ({"devices": (-1,)}, "devices: expected distinct indices"),
    ({"tensor": 2}, "tensor: expected none without devices, got 2"),
    ({"devices": (1, 2, 3), "tensor": 2}, "tensor: expected a divisor of 3"),
    ({"batch": 0}, "batch: expected >= 1"),
    ({"max_tokens": 0}, "max_tokens: expected >= 1"),
  ],
)
def test_settings_that_cannot_be_are_refused(fields, words):
  with pytest.raises(types.InputError, match=f"rewards.model.{words}"):
    models.Model(**({"path": "x"} | fields))


def test_there_are_functions_or_a_model():
  with pytest.raises(
    types.InputError, match="functions: expected at least one"
  ):
    pool.Rewards(functions=())
  pool.Rewards(functions=(), model=models.Model(path="x"))


_ROLES = mesh.Placement(mode="roles", roles=settings.Roles())


@pytest.mark.parametrize(
  ("options", "placement", "talks", "words"),
  [
    ({}, _ROLES, False, "rewards.model: expected placement.mode colocated"),
    ({}, mesh.Placement(), True, "rewards.model: expected a run without env"),
    (
      {"max_tokens": 513},
      mesh.Placement(),
      False,
      "max_tokens: expected at most 512 positions of the model, got 513",
    ),
  ],
)
def test_what_a_run_has_no_place_for_is_refused(
  folder, options, placement, talks, words
):
  cfg = models.Model(path=str(folder), **options)
  with pytest.raises(types.InputError, match=words):
    reward_model.read(cfg, placement, (), talks=talks)


@pytest.mark.parametrize(
  ("edit", "words"),
  [
    ({"chat_template": None}, "expected a tokenizer with a chat template"),
    ({"pad_token": "x" * 9, "eos_token": "?!"}, "tokenizer.eos_token"),
  ],
)
def test_a_tokenizer_that_does_not_serve_is_refused(tmp_path, edit, words):
  tiny_folder.write(tmp_path, **tiny_folder.classifier("llama"))
  file = tmp_path / "tokenizer_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | edit))
  cfg = models.Model(path=str(tmp_path), max_tokens=64)
  with pytest.raises(types.InputError, match=words):
    reward_model.read(cfg, mesh.Placement(), [prompt()], talks=False)


_APART = mesh.Placement(
  mode="split",
  training=mesh.TrainingAxes(fsdp=2),
  generation=mesh.GenerationAxes(data=2),
)


@pytest.mark.parametrize(
  ("options", "placement", "count", "words"),
  [
    ({"devices": (0,)}, mesh.Placement(), 4, "devices: .* the 0 that neither"),
    ({"devices": (2, 3)}, _APART, 5, "devices: .* the 1 that neither"),
    ({"devices": (6,)}, _APART, 6, "devices: expected indices below 6"),
    ({"batch": 3}, _APART, 6, "batch: expected a multiple of its 2 .*, got 3"),
    ({"devices": (2, 3), "batch": 3}, _APART, 6, "a multiple of its 2"),
    ({"devices": (2, 3), "batch": 3, "tensor": 2}, _APART, 6, None),
    ({"batch": 3}, mesh.Placement(generation=mesh.GenerationAxes(1)), 1, None),
  ],
)
def test_devices_that_do_not_serve_are_refused(
  options, placement, count, words
):
  cfg = models.Model(path="x", **options)
  shares = mesh.shares(placement, count)
  if words is None:
    reward_model.check(cfg, placement, shares, processes=1)
    return
  with pytest.raises(types.InputError, match=words) as error:
    reward_model.check(cfg, placement, shares, processes=1)
  assert "\n" not in str(error.value)


def test_devices_that_train_or_generate_are_not_its_own(folder):
  for taken in (0, 1, 6, 7):
    source = source_of(folder, devices=(4, taken))
    with pytest.raises(types.InputError, match=f"generate, got {taken}, which"):
      reward_model.place(
        source,
        mesh.split(_APART, jax.devices()),
        jax.devices(),
        lock=threading.Lock(),
        launched=lambda made: None,
      )


def test_several_processes_are_refused():
  cfg = models.Model(path="x")
  shares = mesh.shares(_APART, 4)
  with pytest.raises(types.InputError, match="expected one process, got 2"):
    reward_model.check(cfg, _APART, shares, processes=2)
  reward_model.check(None, _APART, shares, processes=2)
