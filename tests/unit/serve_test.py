"""The front before JetStream's orchestrator: text, limits, refusals, ports."""

import asyncio
import functools
import socket

import pytest
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_post import serve, types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.sampling import jetstream


class Echo:
  """Stands for the orchestrator: answers with the prompt, one by one."""

  async def Decode(self, request, context):
    """Sends back what came, one token of two samples at a time."""
    content = jetstream.load().messages.DecodeResponse.StreamContent
    for token in request.token_content.token_ids:
      sample = content.Sample(token_ids=[token])
      yield jetstream.load().messages.DecodeResponse(
        stream_content=content(samples=[sample, sample])
      )


class Context:
  """Stands for gRPC's: an abort raises."""

  async def abort(self, code, details):
    """Ends the request."""
    raise ConnectionAbortedError(f"{code.name} {details}")


def check(ids):
  """Refuses a prompt of ten, as an engine would."""
  if not 1 <= len(ids) < 10:
    raise types.InputError(f"prompt: expected 1 to 9 tokens, got {len(ids)}")


@functools.cache
def of_bytes(bos_id=None):
  """Returns a tokenizer of one id a byte: most characters are several."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {letter: i for i, letter in enumerate(["<e>", "<b>", *alphabet])}
  backend = hf.Tokenizer(models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(["<e>", "<b>"])
  return tokenizers.Tokenizer(
    backend=backend,
    pad_id=0,
    eos_ids=(0,),
    bos_id=bos_id,
    names={"bos_token": "<b>"},
  )


def front_of(tokenizer):
  """Returns a front with a limit of nine tokens, and two samples."""
  front = serve.Front(tokenizer, check_prompt=check, max_tokens=9, group_size=2)
  front.orchestrator = Echo()
  return front


def answers(request, tokenizer):
  """Returns ids and text of each response, of the first sample."""
  front = front_of(tokenizer)

  async def collected():
    found = []
    async for response in front.Decode(request, Context()):
      first, second = response.stream_content.samples
      assert first == second
      found.append((tuple(first.token_ids), first.text))
    return found

  return asyncio.run(collected())


def request(text=None, ids=(), **fields):
  """Writes a request of text, or else of ids."""
  kind = jetstream.load().messages.DecodeRequest
  if text is None:
    content = {"token_content": kind.TokenContent(token_ids=ids)}
  else:
    content = {"text_content": kind.TextContent(text=text)}
  return kind(**{"max_tokens": 9, **content, **fields})


def test_a_character_is_told_once_it_is_whole():
  tokenizer = of_bytes()
  text = "é a🙂"
  found = answers(request(text), tokenizer)
  assert tuple(i for ids, _ in found for i in ids) == tokenizer.encode(text)
  assert [new for _, new in found] == ["", "é", " ", "a", "", "", "", "🙂"]


def test_half_a_character_is_told_at_the_end():
  found = answers(request("é", max_tokens=1), of_bytes())
  assert [new for _, new in found] == ["", "\ufffd"]


def test_an_answer_has_at_most_the_tokens_that_were_asked_for():
  tokenizer = of_bytes()
  found = answers(request("abcd", max_tokens=3), tokenizer)
  assert found == [
    ((i,), c) for i, c in zip(tokenizer.encode("abc"), "abc", strict=True)
  ]


def test_ids_are_answered_with_ids_alone():
  assert answers(request(ids=[70, 71]), of_bytes()) == [
    ((70,), ""),
    ((71,), ""),
  ]


def test_the_begin_token_is_left_to_jetstream_and_counts_in_the_length():
  tokenizer = of_bytes(bos_id=1)
  for asked in (request(ids=[1, 70]), request(ids=[70]), request("<b>D")):
    ids = [i for new, _ in answers(asked, tokenizer) for i in new]
    assert len(ids) == 1  # What comes back is what JetStream was sent.
  assert answers(request(ids=[1]), tokenizer) == []
  with pytest.raises(ConnectionAbortedError, match="got 10"):
    answers(request(ids=[70] * 9), tokenizer)


@pytest.mark.parametrize(
  ("asked", "words"),
  [
    (request("a" * 10), "prompt: expected 1 to 9 tokens, got 10"),
    (request(""), "prompt: expected at least one token, got ''"),
    (request(ids=[]), "prompt: expected 1 to 9 tokens, got 0"),
    (request("a", max_tokens=10), "max_tokens: expected 1 to 9, the"),
    (request("a", max_tokens=0), "got 0"),
    (request("a", session_cache="x"), "session_cache: expected none"),
    (
      jetstream.load().messages.DecodeRequest(max_tokens=3),
      "content: expected text_content or token_content, got neither",
    ),
  ],
)
def test_what_the_driver_cannot_take_is_refused_in_one_line(asked, words):
  with pytest.raises(ConnectionAbortedError) as error:
    answers(asked, of_bytes())
  assert str(error.value).startswith("INVALID_ARGUMENT ")
  assert words in str(error.value) and "\n" not in str(error.value)


def test_a_port_that_is_taken_is_named():
  with socket.create_server((serve.HOST, 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(types.InputError, match=f"--port: .* got {port}"):
      asyncio.run(
        serve.listen(
          front_of(of_bytes()),
          None,  # It is not come to.
          port,
          ready=print,
          stopping=lambda: True,
        )
      )
