"""The token that completes a stop string, against a look at every prefix."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_post.sampling import stop_strings

# Pieces as a byte-level tokenizer has them; a special one leaves no text.
_PIECES = (
  b"a", b"b", b"<", b"/", b"</", b"s>", b"ab", b"ba</s", b" a", b"",
  b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"x\xe2\x82", b"\xac<", b"\xff",
  "€".encode(), "😀".encode(), b"\xf0\x9f", b"\x98\x80",
)  # fmt: skip
_STOPS = ("</s>", "ab", "€", "€<", "😀", "aba", "b<", "x€", " a", "bb", "a")


def _decode(ids):
  return b"".join(_PIECES[i] for i in ids).decode("utf-8", errors="replace")


def _ids(*pieces):
  return [
    _PIECES.index(p.encode() if isinstance(p, str) else p) for p in pieces
  ]


def _naive(tokens, start, stops):
  known = _decode(tokens[:start]).rstrip("\ufffd")
  for place in range(start, len(tokens)):
    text = _decode(tokens[: place + 1])
    for stop in stops:
      if text.find(stop, max(0, len(known) + 1 - len(stop))) >= 0:
        return place
  return None


def _by_blocks(tokens, blocks, stops):
  """Looks as an engine does: block by block, until it is told to stop."""
  start = 0
  for size in blocks:
    end = min(start + size, len(tokens))
    found = stop_strings.first_stop(tokens[:end], start, stops, _decode)
    if found is not None:
      return found
    start = end
  return stop_strings.first_stop(tokens, start, stops, _decode)


def test_c60_a_string_across_token_borders_ends_with_its_last_token():
  tokens = _ids("a", "</", "s>", "a")
  for blocks in ([], [1, 1, 1], [2, 1], [2, 2], [4]):
    assert _by_blocks(tokens, blocks, ("</s>",)) == 2


def test_the_earliest_of_several_strings_wins():
  tokens = _ids("b", "<", "a", "b")
  assert stop_strings.first_stop(tokens, 0, ("ab", "b<"), _decode) == 1
  assert stop_strings.first_stop(tokens, 0, ("ab", "</s>"), _decode) == 3


@pytest.mark.parametrize("stops", [(), ("bb",)])
def test_no_string_is_no_place(stops):
  assert stop_strings.first_stop(_ids("a", "b"), 0, stops, _decode) is None
  assert stop_strings.first_stop(_ids("a"), 1, stops, _decode) is None


def test_a_character_in_pieces_counts_with_its_last_one():
  tokens = _ids(b"x\xe2\x82", b"\xac<")
  assert _by_blocks(tokens, [1, 1], ("x€",)) == 1
  assert _by_blocks(tokens, [1, 1], ("x",)) == 0


def test_what_was_whole_before_the_start_is_passed_over():
  tokens = _ids("ab", "a", "ab")
  assert stop_strings.first_stop(tokens, 1, ("ab",), _decode) == 2
  assert stop_strings.first_stop(tokens, 1, ("ba",), _decode) == 1


def test_tokens_without_text_inside_of_a_string_are_seen_through():
  tokens = _ids("</", *[b""] * 40, "s>")
  assert stop_strings.first_stop(tokens, 41, ("</s>",), _decode) == 41


@pytest.mark.parametrize("piece", ["a", "€", b"\xff", b"", b"\x82"])
def test_a_look_costs_the_same_after_any_length(piece):
  cost = []
  for length in (200, 20_000):
    seen = []
    tokens = _ids(*[piece] * length)

    def decode(ids, seen=seen):
      seen.append(len(ids))
      return _decode(ids)

    assert (
      stop_strings.first_stop(tokens, length - 8, ("</s>",), decode) is None
    )
    cost.append(sum(seen))
  assert cost[0] == cost[1] <= 16 * 2 * 6 + 2 * 8 + 16 * 6 * 2


def test_a_typical_look_decodes_the_block_and_one_window():
  seen = []

  def decode(ids):
    seen.append(len(ids))
    return _decode(ids)

  tokens = _ids(*["a"] * 1000)
  assert stop_strings.first_stop(tokens, 992, ("</s>",), decode) is None
  assert sum(seen) == 6 + 6 + (6 + 8)


@hypothesis.given(
  tokens=st.lists(st.integers(0, len(_PIECES) - 1), max_size=40),
  blocks=st.lists(st.integers(1, 9), max_size=20),
  stops=st.lists(st.sampled_from(_STOPS), min_size=1, max_size=3),
)
@hypothesis.settings(max_examples=400)
def test_blocks_find_what_every_prefix_finds(tokens, blocks, stops):
  assert _by_blocks(tokens, blocks, stops) == _naive(tokens, 0, stops)


@hypothesis.given(
  tokens=st.lists(st.integers(0, len(_PIECES) - 1), max_size=40),
  start=st.integers(0, 40),
  stops=st.lists(st.sampled_from(_STOPS), min_size=1, max_size=3),
)
@hypothesis.settings(max_examples=400)
def test_any_start_finds_what_every_prefix_finds(tokens, start, stops):
  found = stop_strings.first_stop(tokens, start, stops, _decode)
  assert found == _naive(tokens, start, stops)
