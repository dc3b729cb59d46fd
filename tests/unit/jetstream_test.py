"""JetStream's interface: its own contract, and the tokens of our engine.

What JetStream's tests of its mock engine and orchestrator ask is asked here of
ours, with the completions of `engine.Engine` as the right answers.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec, transformer, variants
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import jetstream, jetstream_package

_LETTERS = "abcdefghijklmn"
_CONFIG = transformer.Config(
  num_layers=1,
  width=16,
  num_heads=4,
  num_kv_heads=2,
  head_width=4,
  ff_width=32,
  vocab_size=len(_LETTERS) + 2,
  # Prompts and completions reach beyond it.
  window=variants.Window(4, (True,)),
)
_SIZES = engines.Sampling(max_tokens=10, rows=7, block=4)
_MAX_PROMPT = 20
_GROUP = 2
_GREEDY = types.SamplingParams(temperature=0.0, max_tokens=10, stop_ids=(1,))
_FREE = dataclasses.replace(_GREEDY, temperature=1.0)
_TOKENIZER = tokenizers.characters(_LETTERS)


@functools.cache
def _params(seed=0):
  tree = transformer.spec(_CONFIG)
  return spec.init(tree, jax.random.key(seed), jnp.dtype("float32"))


@functools.cache
def _mesh():
  return meshes.build(meshes.GenerationAxes(data=1), jax.devices()[:1])


@functools.cache
def _compiled():
  return generator.compiled(
    _mesh(),
    rules={},
    decoder=decoders.Decoder(_CONFIG),
    cfg=_SIZES,
    max_prompt=_MAX_PROMPT,
    group=2,
  )


def engine(sampling=_GREEDY, tokenizer=_TOKENIZER):
  """Returns an engine of three slots, of two rows each, and an idle row."""
  return jetstream.Engine(
    _compiled(),
    _SIZES,
    params=_params(),
    tokenizer=tokenizer,
    vocab_size=_CONFIG.vocab_size,
    sampling=sampling,
    group_size=_GROUP,
    max_prompt=_MAX_PROMPT,
    key=jax.random.key(5),
    mesh=_mesh(),
    dispatch=contextlib.nullcontext(),
  )


def ours():
  """Returns the package's own engine of the same steps, sizes and key."""
  return engines.Engine(
    _compiled(),
    _SIZES,
    max_prompt=_MAX_PROMPT,
    vocab_size=_CONFIG.vocab_size,
    key=jax.random.key(5),
    dispatch=contextlib.nullcontext(),
  )


def expected(texts, sampling=_GREEDY):
  """Returns our engine's tokens of each prompt's group, stop tokens left out.

  The n-th prompt has the uids that it has as the n-th one inserted.
  """
  policy = types.Policy(params=_params(), version=0, step=0)
  requests = [
    types.Request(
      prompt=_TOKENIZER.encode(text),
      uids=tuple(range(_GROUP * n, _GROUP * n + _GROUP)),
      sampling=sampling,
    )
    for n, text in enumerate(texts)
  ]
  done = engines.generate(ours(), policy, requests)
  cut = [c.tokens[:-1] if c.finish == "stop" else c.tokens for c in done]
  return [cut[i : i + _GROUP] for i in range(0, len(cut), _GROUP)]


def prefilled(made, text, **options):
  """Prefills a prompt as JetStream's driver does."""
  ids, length = made.build_tokenizer(made.get_tokenizer()).encode(
    text, max_prefill_length=made.max_prefill_length, **options
  )
  return made.prefill(
    params=made.load_params(), padded_tokens=ids, true_length=length
  )


def drained(made, state, slot, params=None, max_tokens=99):
  """Generates until a slot is complete, as JetStream judges it."""
  process = jetstream.load().token_utils.process_result_tokens
  params = made.load_params() if params is None else params
  complete = np.zeros(made.samples_per_slot, bool)
  tokens = [() for _ in complete]
  while not complete.all():
    state, results = made.generate(params, state)
    results.copy_to_host_async()
    samples, complete = process(
      tokenizer=made.build_tokenizer(made.get_tokenizer()),
      slot=slot,
      slot_max_length=max_tokens,
      result_tokens=results.convert_to_numpy(),
      complete=complete,
    )
    tokens = [
      a + tuple(b.token_ids) for a, b in zip(tokens, samples, strict=True)
    ]
  return tokens


# ------------------------------------------------------------------- loading


def test_the_root_logger_and_seqio_are_as_they_were_after_loading():
  root = logging.getLogger()
  before = root.level, list(root.handlers)
  jetstream_package.load.__wrapped__()
  assert (root.level, list(root.handlers)) == before
  assert not {"seqio", "tiktoken", "tensorflow"} & sys.modules.keys()
  assert getattr(jax, "tree_map")(abs, [-1]) == [1]  # noqa: B009 (gone)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "jetstream.engine.engine_api", None)
  with pytest.raises(types.InputError) as error:
    jetstream_package.load.__wrapped__()
  assert "\n" not in str(error.value)
  assert "pip install --no-deps google-jetstream==0.2.2" in str(error.value)


def test_another_version_is_refused(monkeypatch):
  monkeypatch.setattr(jetstream_package, "VERSION", "0.3.0")
  with pytest.raises(types.InputError, match=r"expected version 0\.3\.0"):
    jetstream_package.load.__wrapped__()


# ------------------------------------------------------------------ contract


@pytest.mark.parametrize("name", ["Engine", "Tokenizer"])
def test_every_member_of_the_interface_is_there_with_its_parameters(name):
  package = jetstream.load()
  api = {"Engine": package.engine_api, "Tokenizer": package.tokenizer_api}[name]
  theirs, mine = getattr(api, name), getattr(jetstream, name)
  assert issubclass(mine, theirs)
  members = {n for n, v in vars(theirs).items() if not n.startswith("_")}
  assert members
  for member in members:
    one, other = getattr(theirs, member), getattr(mine, member)
    assert isinstance(one, property) == isinstance(other, property)
    if not isinstance(one, property):
      names = [list(inspect.signature(f).parameters) for f in (one, other)]
      assert names[0] == names[1], member


def test_what_is_loaded_is_what_was_given():
  assert engine().load_params() is _params()


def test_sizes_are_slots_of_groups_and_a_bucket_of_jetstream():
  made = engine()
  assert (made.max_concurrent_decodes, made.samples_per_slot) == (3, 2)
  assert made.max_prefill_length == 32
  assert made.mesh is _mesh() and made.colocated_cpus is None


def test_prefill_takes_padding_of_jax_and_of_numpy():
  made = engine()
  a, b = (prefilled(made, "cab", jax_padding=x) for x in (True, False))
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert a.length.tolist() == [3]


def test_a_begin_token_that_the_model_lacks_is_left_out():
  made = engine()
  pad = jetstream.load().token_utils.pad_tokens
  tokenizer = made.build_tokenizer(made.get_tokenizer())
  ids, length = pad(
    list(_TOKENIZER.encode("cab")), tokenizer.bos_id, tokenizer.pad_id
  )
  assert length == 4
  prefix = made.prefill(params=_params(), padded_tokens=ids, true_length=length)
  jax.tree.map(np.testing.assert_array_equal, prefix, prefilled(made, "cab"))


def test_a_begin_token_that_the_model_has_stands_once():
  has = dataclasses.replace(
    _TOKENIZER, bos_id=2, names={"bos_token": _LETTERS[0]}
  )
  tokenizer = jetstream.Tokenizer(has)
  for text in ("bc", "abc"):
    ids, length = tokenizer.encode(text)
    assert ids[:length].tolist() == [2, 3, 4] and ids.shape == (16,)
  assert tokenizer.encode("bc", is_bos=False)[1] == 2


def test_every_end_token_stops_and_padding_does_not():
  two = dataclasses.replace(_TOKENIZER, eos_ids=(1, 4))
  tokenizer = jetstream.Tokenizer(two)
  assert tokenizer.stop_tokens == {1, 4}
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (1, 0, -1)
  assert tokenizer.decode([2, 3], is_streaming=True) == "ab"


@pytest.mark.parametrize("slot", [0, 2])
def test_a_prompt_in_any_slot_gives_the_greedy_tokens_of_our_engine(slot):
  made = engine()
  state = made.insert(
    prefilled(made, "cab"), made.init_decode_state(), slot=slot
  )
  assert drained(made, state, slot) == expected(["cab"])[0]


def test_sampled_groups_are_those_of_our_engine_whatever_their_slots():
  made = engine(_FREE)
  state = made.init_decode_state()
  for text, slot in (("cab", 2), ("n" * 20, 0)):
    state = made.insert(prefilled(made, text), state, slot)
  right = expected(["cab", "n" * 20], _FREE)
  assert right[0][0] != right[0][1]  # a group differs
  process = functools.partial(drained, made)
  first = made.insert(prefilled(made, "cab"), made.init_decode_state(), slot=1)
  assert process(first, 1) == right[0]
  tokens = {0: [(), ()], 2: [(), ()]}
  for _ in range(3):
    state, results = made.generate(_params(), state)
    for slot in tokens:
      found = results.get_result_at_slot(slot)
      tokens[slot] = [
        old + tuple(np.array(new)[np.array(valid) == 1].tolist())
        for old, new, valid in zip(
          tokens[slot], found.tokens, found.valid, strict=True
        )
      ]
  cut = {
    slot: [t[:-1] if t[-1] == 1 else t for t in group]
    for slot, group in tokens.items()
  }
  assert [cut[2], cut[0]] == right


def test_a_slot_is_taken_again_before_its_group_has_ended():
  made = engine()
  state = made.insert(prefilled(made, "a"), made.init_decode_state(), slot=1)
  state, _ = made.generate(_params(), state)
  state = made.insert(prefilled(made, "cab"), state, slot=1)
  assert drained(made, state, 1) == expected(["cab"])[0]


def test_weights_are_those_of_the_call():
  made, mine = engine(), ours()
  state = made.insert(prefilled(made, "cab"), made.init_decode_state(), slot=0)
  state, _ = made.generate(_params(), state)
  found = drained(made, state, 0, params=_params(1))
  request = types.Request(
    prompt=_TOKENIZER.encode("cab"), uids=(0, 1), sampling=_GREEDY
  )
  mine.add(request)
  mine.step(_params(), 0)
  done = []
  while mine.busy:
    done += mine.step(_params(1), 1)
  late = [c.tokens[4:] for c in sorted(done, key=lambda c: c.uid)]
  assert found == [t[:-1] if t[-1] == 1 else t for t in late]
  assert found != [t[4:] for t in expected(["cab"])[0]]


def test_lengths_are_those_before_the_block_plus_1():
  made = engine()
  state = made.insert(prefilled(made, "cab"), made.init_decode_state(), slot=0)
  lengths = []
  for _ in range(2):
    state, results = made.generate(_params(), state)
    lengths.append(results.get_result_at_slot(0).lengths.tolist())
  assert results.data.shape == (7, 2 * _SIZES.block + 1)
  assert lengths == [[1, 1], [5, 5]]


# ------------------------------------------------------------------- refusals


def test_a_prompt_that_is_too_long_is_refused_and_not_cut():
  made = engine()
  for length in (21, 40):  # JetStream itself has cut the second.
    with pytest.raises(types.InputError, match=f"got {length}"):
      prefilled(made, "a" * length)


def test_what_prefill_cannot_take_is_refused():
  made = engine()
  prefix = prefilled(made, "a")
  wrong = np.full(16, 16, np.int32)
  for match, options in (
    ("expected none", {"existing_prefix": prefix, "true_length": 1}),
    ("got 16", {"true_length": 1}),
    ("got 0", {"true_length": 0}),
  ):
    with pytest.raises(types.InputError, match=match):
      made.prefill(params=_params(), padded_tokens=wrong, **options)


def test_sizes_that_jetstream_cannot_serve_are_refused():
  with pytest.raises(types.InputError, match=r"sampling\.rows.*8.*got 7"):
    jetstream.check(_SIZES, 8, 20)
  with pytest.raises(types.InputError, match=r"max_prompt.*32767.*got 32768"):
    jetstream.check(_SIZES, 2, 32768)
  small = dataclasses.replace(_SIZES, cache=0.5)
  with pytest.raises(types.InputError, match=r"sampling\.cache.* 1 .*got 0.5"):
    jetstream.check(small, 2, 20)


# --------------------------------------------------------------- orchestrator


def asked(made, requests):
  """Asks JetStream's driver without a server; tokens and texts by request."""
  package = jetstream.load()

  async def one(client, request):
    samples = [([], []) for _ in range(made.samples_per_slot)]
    async for response in client.Decode(request):
      for (ids, texts), new in zip(
        samples, response.stream_content.samples, strict=True
      ):
        ids += new.token_ids
        texts.append(new.text)
    return [(tuple(ids), "".join(texts)) for ids, texts in samples]

  async def everything():
    params = [made.load_params()]
    driver = package.orchestrator.Driver(
      prefill_engines=[made],
      generate_engines=[made],
      prefill_params=params,
      generate_params=params,
      interleaved_mode=True,
    )
    try:
      client = package.orchestrator.LLMOrchestrator(driver=driver)
      return await asyncio.gather(*(one(client, r) for r in requests))
    finally:
      await asyncio.to_thread(driver.stop)

  return asyncio.run(everything())


def test_the_orchestrator_gives_our_tokens_for_text_and_for_ids():
  messages = jetstream.load().messages
  content = messages.DecodeRequest
  texts = ["cab", "b", "nml", "a" * 19, "hg"]
  requests = [
    messages.DecodeRequest(
      max_tokens=10, text_content=content.TextContent(text=text)
    )
    for text in texts
  ]
  requests += [
    messages.DecodeRequest(
      max_tokens=10,
      token_content=content.TokenContent(token_ids=_TOKENIZER.encode(text)),
    )
    for text in texts
  ]
  found = asked(engine(), requests)
  right = expected(texts)
  assert len({tuple(group) for group in right}) == len(texts)
  assert [[ids for ids, _ in group] for group in found] == right + right
  assert [[text for _, text in group] for group in found[:5]] == [
    [_TOKENIZER.decode(ids) for ids in group] for group in right
  ]
  assert {text for group in found[5:] for _, text in group} == {""}
