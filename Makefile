PYTHON ?= python3
VENV := .venv
RUN ?= runs/demo
STAMP := $(VENV)/.installed
ROOMS := extract jaxprobe selection pgir benchmarks

.PHONY: demo real test mutants lint types setup clean

demo: $(STAMP)
	$(VENV)/bin/beatrice demo $(RUN)

# Published questions below DATA, a released model: make real DATA=DIR MODEL=smollm2
MODEL ?= gemma
real: $(STAMP)
	@test -n "$(DATA)" || { echo "make real DATA=DIR: a folder with questions of TriviaQA, NQ and PopQA"; exit 2; }
	$(VENV)/bin/beatrice real "$(DATA)" "runs/$(notdir $(MODEL))" --model "$(MODEL)"

test: $(STAMP)
	$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal

# Which changes of the source the tests notice; an hour or two, and the same command again
# continues: make mutants MUTANTS="-n 300 --seed 0"
mutants: $(STAMP)
	$(VENV)/bin/python -m tests.mutation $(MUTANTS)

lint: $(STAMP) types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# What pyright says in its standard mode. It cannot follow an editable installation, so
# the package is laid out for it as links.
types: $(STAMP)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[types]'
	mkdir -p build/types/beatrice
	ln -sfn $(CURDIR)/api/* $(addprefix $(CURDIR)/,$(ROOMS)) build/types/beatrice/
	$(VENV)/bin/basedpyright --level error

setup: $(STAMP)

# On Linux the registry's Torch brings several gigabytes of GPU libraries. A CPU build
# that is in .venv before, or that pip finds first (PIP_FIND_LINKS), spares them.
$(STAMP): pyproject.toml setup.py constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info  # runs/ is yours
