"""What every test stands on; must not import the package under test.

Shapes in signatures are checked while tests run. The checker rewrites modules
as they are imported, so it has to be in place before the first of them is.
"""

import os

# Most of a test is compilation; unoptimised code is compiled in half the time.
# Programs that tests start inherit it.
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
  ]
).strip()

import beartype.typing  # noqa: E402, F401 (named in CHECKER)
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# A GPU is for a run, or for who asks: JAX_PLATFORMS=cuda.
if "JAX_PLATFORMS" not in os.environ:
  jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The checker sees one function at a time: `Self` tells it nothing. As in the
# type system, an int will do where a float is asked for.
CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
  is_pep484_tower=True,
  hint_overrides=beartype.FrozenDict({beartype.typing.Self: object}),
))"""
jaxtyping.install_import_hook("jaxrl_post", CHECKER)

# Compilation makes the first example slow, and a test that fails today has to
# fail tomorrow: no deadline, no chance.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True)
hypothesis.settings.load_profile("house")


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_file():
  """Frees compiled programs: a process has only so many memory maps."""
  yield
  jax.clear_caches()
