"""The promised names are few, and are there."""

import jaxrl_post

MAX_NAMES = 40


def test_the_package_promises_at_most_40_names():
  assert 0 < len(jaxrl_post.__all__) <= MAX_NAMES
  assert len(set(jaxrl_post.__all__)) == len(jaxrl_post.__all__)


def test_every_promised_name_resolves():
  missing = [n for n in jaxrl_post.__all__ if not hasattr(jaxrl_post, n)]
  assert missing == []
