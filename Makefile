# Commands of the repository; `make help` lists them. They need Python 3.11 or newer, git and make.

# The interpreter that the environments are made with.
PYTHON ?= $(firstword $(foreach python,python3 python3.11 python3.12 python3.13 python3.14,\
	$(shell $(python) -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
VENV ?= .venv
RUNTIME_VENV ?= .venv-runtime
SERVE_VENV ?= .venv-serve
TORCH_VENV ?= .venv-torch
# Processes that `make test` shares the test files among, each with one thread.
WORKERS ?= 2

# Where torch comes from; empty: pip's own configuration. The build without CUDA, 200 MB instead of some GB:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH ?= >=2.13,<2.14
# What `make test-versions` pairs.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TORCHES ?= 2.13 2.14 2.15

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# What tests need is installed by uv, in a tenth of pip's time; a mirror is named by UV_INDEX_URL.
INSTALL = -m uv pip install --quiet
INSTALL_SERVE = $(INSTALL) --python $(SERVE_VENV)/bin/python
PROJECTS = pyproject.toml runtimes/python/pyproject.toml
RUNTIME_SOURCES = $(shell find runtimes/python/aotexport_runtime -type f -not -name '*.pyc')
# What `make test` runs the tests of: a room of the exporter or of the runtime, see tests/rooms; empty: all.
ROOM ?=
TESTS = $(if $(ROOM),$(shell sed -n 's/^$(ROOM): //p' tests/rooms),--ignore=tests/sweeps)

CHECKS = check-style check-types check-layers check-schemas
# torch and the model libraries use as many threads as there are cores; hubs are never asked.
export HF_HUB_OFFLINE = 1
# Hundreds of processes of the tests would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve-demo chat-demo test test-serve test-torch test-versions test-full lint pytest pytest-serve fuzz mutants bench bench-serve dist clean check-pages site $(CHECKS)

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.demo $(RUNTIME_VENV)/.made ## export a model, fine-tune its bundle without the model's code, compare with eager
	@$(BIN)/python examples/demo.py --runtime $(RUNTIME_VENV)/bin/python --output demo

test: ## check style, types and schemas, and run the tests; ROOM=capture: the tests of that room
	@$(MAKE) --no-print-directory -j pytest $(if $(filter-out server,$(ROOM)),,pytest-serve) $(CHECKS) check-pages

test-torch: ## run the tests under another torch, in an environment of its own; TORCH='==2.15.*'
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch$(TORCH)'
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --editable runtimes/python \
		--editable '.[dev,examples]' 'torch$(TORCH)'
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile \
		--no-loadscope-reorder --junitxml $(TORCH_VENV)/tests.xml --ignore=tests/sweeps

test-versions: ## run the tests under each of PYTHONS with each of TORCHES, write docs/versions.md
	failed=0; for python in $(PYTHONS); do for torch in $(TORCHES); do \
		$(MAKE) --no-print-directory test-torch PYTHON=$$python TORCH="==$$torch.*" \
			TORCH_VENV=.venv-torch/$$python-$$torch || failed=1; \
	done; done; \
	$(PYTHON) -m tests.golden.matrix --run .venv-torch/*/bin/python --tests .venv-torch/*/tests.xml && exit $$failed

test-serve: $(SERVE_VENV)/.all ## run the tests of the server, in an environment of its own that has KServe
	OMP_NUM_THREADS=1 $(SERVE_VENV)/bin/python -m pytest tests/serving
# Apart: Triton's client and KServe define messages of the same names.
	OMP_NUM_THREADS=1 $(SERVE_VENV)/bin/python -m pytest tests/meta/test_public_api.py \
		tests/clusters/test_manifests.py tests/unit/serving/test_plane.py -k "server or manifest or plane"

serve-demo: $(SERVE_VENV)/.all ## export MiniLM, serve it, ask for similar sentences, swap in a tuned version under load
	@$(SERVE_VENV)/bin/python examples/serving/demo.py

chat-demo: $(SERVE_VENV)/.all ## train a small Llama on conversations, and chat with it behind the server
	@$(SERVE_VENV)/bin/python examples/chat/demo.py

test-full: lint test-serve ## the same with the slow tests and the sweeps
	$(BIN)/python -m pytest

lint: $(VENV)/.dev $(CHECKS) site ## check style, types, layers, and that the generated schemas are fresh

pytest: $(VENV)/.dev
	$(if $(TESTS),,$(error no room `$(ROOM)`; there are $(shell sed -n 's/^\([a-z_]*\): .*/\1/p' tests/rooms)))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--durations=25 $(TESTS)

# A real server: both protocols, wrong requests, a swap and a killed worker under load, no torch. The rest: test-serve.
pytest-serve: $(SERVE_VENV)/.made
	OMP_NUM_THREADS=1 $(SERVE_VENV)/bin/python -m pytest tests/serving -m "not slow" \
		-k "test_protocol or refusals or under_load or killed or without_torch"

check-style: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell *.md aotexport benchmarks docs examples runtimes/python schemas/*.md

check-types: $(VENV)/.dev
	$(BIN)/pyrefly check

check-layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

check-schemas: $(VENV)/.dev
	$(BIN)/python schemas/tools/diff.py --check
	$(BIN)/python schemas/tools/generate.py --check

# Links of all pages; the reference, which takes half of the time, is left to `make lint`.
check-pages: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -t quick -b dummy -d out/quick -c docs . out/quick/pages

site: $(VENV)/.dev ## build the pages as a site, in out/site
	$(BIN)/sphinx-build -q -W --keep-going -d out/doctrees -c docs . out/site

fuzz: $(VENV)/.dev ## fuzz what reads bytes, guided by coverage; ARGS="--seconds 600", ARGS=--help shows the choices
	@$(BIN)/python -m tests.fuzz.guided $(ARGS)

mutants: $(VENV)/.dev ## change one token of ROOM at a time, N times, and list what its tests do not notice
	@$(BIN)/python -m tests.mutants $(ROOM) $(or $(N),20) $(ARGS)

bench: $(VENV)/.dev ## measure against eager and peers, write benchmarks/RESULTS.md; ARGS="--help" shows the choices
	$(BIN)/python -m benchmarks --markdown benchmarks/RESULTS.md --json benchmarks/results.json \
		--plots benchmarks/plots $(ARGS)

bench-serve: $(SERVE_VENV)/.all ## measure servers: bundles beside eager and ONNX Runtime behind the same server
	$(SERVE_VENV)/bin/python -m benchmarks --suite serve $(ARGS)

dist: $(VENV)/.dev ## build wheels and source archives of both distributions, check them; and out/man/aotexport.1
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist runtimes/python
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/sphinx-build -q -b man -d out/doctrees -c docs . out/man

clean: ## remove everything that these commands made
	rm -rf $(VENV) $(RUNTIME_VENV) $(SERVE_VENV) .venv-torch demo build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments, each with a stamp that is renewed when its sources change ------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone, so that no other requirement brings in a build from another index: pip finds the wheel.
$(VENV)/wheels: | $(BIN)/python
	$(PIP) install --quiet uv
	$(PIP) download --progress-bar off --no-deps --dest $@ \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch$(TORCH)'

$(VENV)/.torch: | $(VENV)/wheels
	$(BIN)/python $(INSTALL) --no-deps $(VENV)/wheels/torch-*.whl
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(PROJECTS)
	$(PIP) install --quiet --editable runtimes/python --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(PROJECTS)
	$(BIN)/python $(INSTALL) --editable runtimes/python --editable '.[dev,examples]'
	@touch $@ $(VENV)/.demo

# KServe asks for older releases of packages than `.[dev]` has.
$(SERVE_VENV)/.made: $(PROJECTS) | $(VENV)/wheels
	$(BIN)/python -m uv venv --quiet --allow-existing --python $(PYTHON) $(SERVE_VENV)
	$(BIN)/python $(INSTALL_SERVE) --no-deps $(VENV)/wheels/torch-*.whl
	$(BIN)/python $(INSTALL_SERVE) --editable 'runtimes/python[onnx]' --editable '.[onnx,serve]' 'pytest>=8'
	@touch $@

$(SERVE_VENV)/.all: $(SERVE_VENV)/.made
	$(BIN)/python $(INSTALL_SERVE) --editable '.[browser,examples,peers]'
	@touch $@

$(RUNTIME_VENV)/.made: $(VENV)/.demo examples/runtime_venv.py $(RUNTIME_SOURCES)
	$(BIN)/python examples/runtime_venv.py $(RUNTIME_VENV)
	@touch $@
