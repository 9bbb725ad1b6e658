# `make test` and `make demo` need Python and make only; they create a virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-slow lock lint demo docs coverage mutants fuzz chaos soak clean release

# Everything with hashes, then torch and torchvision by version (see constraints.txt). Python compiles
# what is imported; pip would compile all files.
$(READY): pyproject.toml requirements.lock constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(READY)

# Refreshes requirements.lock: the newest versions that pyproject.toml allows, for all systems and
# all versions of Python that it allows, with the hashes of all their files.
lock:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --constraint constraints.txt --universal \
		--python-version 3.10 --upgrade --generate-hashes --no-annotate --quiet \
		--custom-compile-command 'make lock' --output-file $(VENV)/requirements.txt
	awk '/^[a-z]/ {keep = !/^(torch|torchvision|nvidia-.*|cuda-.*)==/} /^#/ || keep' \
		$(VENV)/requirements.txt > requirements.lock

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread per process: small tensors do not benefit from several threads.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n 2 --dist loadfile

test: lint
	$(TEST)

test-slow: $(READY)
	$(BIN)/pytest -m slow

# How many lines of src the tests of `make test` run through, for every file; takes half as long again.
coverage: lint
	$(TEST) --cov --cov-report=
	$(BIN)/coverage report --skip-covered

# Whether the tests notice 150 small mistakes in the mathematics; about an hour on 2 cores.
mutants: $(READY)
	$(BIN)/python tools/mutants.py --out mutants.json

# 20,000 damaged pictures and 2,000 hostile weights files, each with limits; ten minutes on 2 cores.
fuzz: $(READY)
	$(BIN)/python tools/fuzz.py

# Kills, full disks and second writers; a quarter of an hour.
chaos: $(READY)
	$(BIN)/python tools/chaos.py

# Whether memory and open files stay flat; half an hour.
soak: $(READY)
	$(BIN)/python tools/soak.py

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

# Warnings are errors, and nothing is downloaded; site/index.html opens from the disk.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds the wheel and the source archive, checks their metadata, and explains a photo with the wheel
# in an empty environment. What to do before and after is in CONTRIBUTING.md.
release: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv dist/.try
	dist/.try/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist/.try && bin/bcosvit --version && bin/bcosvit explain lib/python3*/site-packages/bcosvit/photos/chelsea.jpg
	rm -rf dist/.try

clean:
	rm -rf $(VENV) build dist demo-out site .mypy_cache .ruff_cache .pytest_cache
