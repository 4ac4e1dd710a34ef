# On a fresh machine with Python 3.11 or newer, one command does all: `make demo`, or `make lint test`.
#
# Variables, given as `make test ARGS="-k macro"`:
#   PYTHON       the interpreter that creates the environment
#   VENV         the environment's folder
#   ARGS         more arguments for demo, lab, quick and test
#   WORKERS      test processes, each on one thread; "logical" is one for every core, 0 is none beside pytest's own
#   NOTEBOOKS    the notebooks to execute
#   CHECK        if 1, `make notebooks` changes no notebook and names what left the committed outputs
#   BROWSER      the command of the Chromium browser that prints PDF files, if it is not found by itself
#   SEED         the number of the exam that `make exam` draws
#   REPO         owner/name of the GitHub repository, for badges
#   TORCH_INDEX  a package index to take torch alone from. On Linux, PyPI's torch brings gigabytes of CUDA libraries;
#                without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves them. Read at installation only:
#                `make distclean` first if torch is installed already.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= logical
NOTEBOOKS ?= notebooks/*.ipynb notebooks/solutions/*.ipynb
REPO ?=
SEED ?= 1
BROWSER ?=
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal
QUICK = $(wildcard tests/test_macro_*.py tests/test_ppo.py tests/test_examples.py)
BADGED = $(wildcard README.md notebooks/*.ipynb notebooks/solutions/*.ipynb)
# versions: environment, Python, options of uv. The tests are those of a user's way; ARGS in their place runs others.
USUAL = $(QUICK) $(addprefix tests/test_,checkpoint.py resume.py baselines.py supervised.py plots.py cli.py)
define versions
	@command -v uv >/dev/null || { echo "uv is needed: pip install uv" >&2; exit 2; }
	uv venv -q --allow-existing --python $(if $(filter file,$(origin PYTHON)),$(2),$(PYTHON)) $(1)
	uv pip install -q --python $(1) $(3) -e '.[notebooks,dev]'
	$(1)/bin/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(or $(ARGS),$(USUAL))
endef
SITES := colab\.research\.google\.com/github/|kaggle\.com/kernels/welcome\?src=https://github\.com/|git\+https://github\.com/
LIVE_PAGE = https://$(firstword $(subst /, ,$(REPO))).github.io/$(lastword $(subst /, ,$(REPO)))/figures/interactive/one_update.html
HOME_PAGE := [A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(/tree/main/notebooks\))

export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo lab quick test lowest newest lint format bench gpu diagnosis tables notebooks book slides handout exam pdf badges dist clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Create the environment with the tested versions (again only if they change)

demo: $(STAMP) ## Train PPO and MA-PPO on two tasks, four minutes; with ACT=1 on the first only, one minute
	$(BIN)/marlhf demo $(ARGS)

# The server's root is the repository, so that links from lessons to other pages lead there.
lab: $(STAMP) ## Open the first lesson in JupyterLab, which shows all figures of notebooks that are trusted
	$(BIN)/jupyter trust notebooks/*.ipynb notebooks/solutions/*.ipynb
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb \
	    $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

quick: $(STAMP) ## Test equations, one update and one small run: what one runs while working, at most 2 minutes
	$(PYTEST) $(QUICK) $(ARGS)

# At most 8 workers: each may hold a model and a notebook's kernel, about 2 GB.
test: $(STAMP) ## Run all tests, on all cores; what only checks texts is in `make lint`
	$(PYTEST) --ignore tests/hygiene $(ARGS)

# uv brings the interpreter where it can; else name one, such as PYTHON=python3.13. UV_TORCH_BACKEND=cpu in front of make
# saves the CUDA libraries.
lowest: ## Test with the lowest versions that pyproject.toml allows, on Python 3.11, in an environment of its own (needs uv)
	$(call versions,$(VENV)-lowest,3.11,--resolution lowest-direct)

newest: ## Test with the newest versions there are, on Python 3.13, in an environment of its own (needs uv)
	$(call versions,$(VENV)-newest,3.13,--upgrade)

lint: $(STAMP) ## Check style, formatting, types (the room of PPO), and what is promised in texts: versions, links, glossary, drawings, notebooks
	@status=0; \
	$(BIN)/python -m ruff check . || status=1; \
	$(BIN)/python -m ruff format --check . || status=1; \
	$(BIN)/python -m mypy || status=1; \
	$(BIN)/python -m pytest -q --noconftest tests/hygiene || status=1; \
	exit $$status

format: $(STAMP) ## Fix what the linter can, and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP) ## Time macro operations, log-probabilities and updates (benchmarks/ has more)
	$(BIN)/python benchmarks/macro_ops.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/update.py

gpu: $(STAMP) ## Test and measure on one GPU of 80 GB, in fifteen minutes; the record goes to data/results/gpu/
	$(BIN)/python benchmarks/gpu.py $(ARGS)

diagnosis: $(STAMP) ## Measure what critic and estimators get of the credit, seed 0 (about 15 minutes); see notebook 13
	$(BIN)/marlhf sft --output_dir runs/diagnosis/sft
	$(BIN)/marlhf rm --sft runs/diagnosis/sft --output_dir runs/diagnosis/rm
	$(BIN)/python -m marlhf_lab.credit.diagnosis --sft runs/diagnosis/sft --rm runs/diagnosis/rm $(ARGS)

tables: $(STAMP) ## Write the tables of docs/results.md and README.md anew, from the stored results
	$(BIN)/python -m marlhf_lab.studies.result_tables

notebooks: $(STAMP) ## Execute the notebooks in the cpu profile and write their outputs back; CHECK=1 only compares
ifdef CHECK
	MARLHF_PROFILE=cpu $(BIN)/python book/check_outputs.py $(NOTEBOOKS)
else
	MARLHF_PROFILE=cpu $(BIN)/jupyter nbconvert --to notebook --inplace --execute \
	    --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False $(NOTEBOOKS)
	$(BIN)/jupyter nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS)
endif

book: $(VENV)/.book ## Build the site of lessons, solutions and glossary in build/book, with outputs as committed
	$(BIN)/sphinx-build -q -E -j auto -c book . build/book
	@echo "open build/book/index.html"

slides: $(VENV)/.book ## Build two decks in build/slides, with notes and clock times: a lecture of two hours, and session 1
	$(BIN)/sphinx-build -q -E -b revealjs book/slides build/slides
	@echo "open build/slides/lecture.html or build/slides/session_1.html"

handout: $(STAMP) ## Copy the lessons to build/handout without outputs, with cheat sheet, homework and the page to play
	$(BIN)/python book/handout.py notebooks build/handout

exam: $(STAMP) ## Draw an exam with new numbers, and its answers, in build/exam: SEED=7
	$(BIN)/python -m marlhf_lab.exam --seed $(SEED)

pdf: book ## Print the site's lessons and the cheat sheet to build/pdf with Chromium or Chrome (see BROWSER)
	BROWSER='$(BROWSER)' $(BIN)/python book/print_pdf.py build/book build/pdf

badges: ## Point badges and links at a repository on GitHub, and the live page at its site: REPO=owner/name
	@echo '$(REPO)' | grep -Eqx '[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+' || \
	{ echo "REPO='$(REPO)': give the repository as REPO=owner/name" >&2; exit 2; }
	sed -E -i.bak 's#<!-- live -->.*<!-- /live -->#<!-- live -->**[Step through one update yourself]($(LIVE_PAGE))**, in your browser.<!-- /live -->#' README.md
	sed -E -i.bak 's#($(SITES))[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#\1$(REPO)#g; s#(\(https://github\.com/)$(HOME_PAGE)#\1$(REPO)\2#g' $(BADGED)
	rm -f $(BADGED:=.bak)

# The sdist is installed last: what it lacks is missed then. The command runs in a folder where no checkout is near.
dist: $(STAMP) ## Build wheel and sdist in dist/, and try both in an empty environment
	rm -rf dist build/dist && mkdir -p build/dist
	$(BIN)/python -m hatchling build
	$(PYTHON) -m venv build/dist/venv
ifneq ($(strip $(TORCH_INDEX)),)
	build/dist/venv/bin/python -m pip install -q --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch
endif
	for file in dist/*.whl dist/*.tar.gz; do \
	    build/dist/venv/bin/python -m pip install -q --force-reinstall --no-deps $$file && \
	    build/dist/venv/bin/python -m pip install -q -c constraints.txt $$file && \
	    (cd build/dist && rm -rf run && PYTHONPATH= ACT=1 venv/bin/marlhf demo --size 60 --updates 1 --eval_prompts 4 \
	        --output_dir run) || exit 1; \
	done
	@ls -l dist

clean: ## Remove caches and builds; keep the environment and the runs
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find marlhf_lite marlhf_lab tests benchmarks data -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest benchmarks/trl_ppo/.trl

$(VENV)/.book: $(STAMP)
	$(PIP) install -c constraints.txt -e '.[book]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Python 3.11 or newer is needed. If it has another name: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	{ echo "No environment could be made. On Debian and Ubuntu, install the package python3-venv." >&2; exit 1; }
ifneq ($(strip $(TORCH_INDEX)),)
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch
endif
	$(PIP) install -c constraints.txt -e '.[notebooks,dev]'
	@touch $@
