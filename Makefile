SHELL := /bin/bash
BIN := .venv/bin

# Jupyter, the hub's cache and matplotlib write into the home folder; a read-only one is replaced.
ifneq ($(shell test -w "$$HOME" && echo writable),writable)
export HOME := $(CURDIR)/build/home
$(shell mkdir -p "$(HOME)")
endif

.PHONY: setup run test lab nodes nodes-down bench picture lint lock

setup:
	@env/setup.sh

run: setup
	@$(BIN)/python -m helpers.run_notebooks

test: setup lint
	$(BIN)/pytest tests
	$(BIN)/pytest --nbmake notebooks

# JupyterLab refuses root, which is who one is in many containers, unless told so.
lab: setup
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

# N=3 nodes on this machine, to try a cluster on; nodes-down removes them. Needs root.
nodes:
	@env/lab/nodes up $(or $(N),3)

nodes-down:
	@env/lab/nodes down

# all_reduce on oneCCL against gloo; a training from a notebook against bare mpiexec; two ranks
# against one; the published recipe against the course's, which takes an hour
bench: setup
	$(BIN)/python -m bench.collectives
	$(BIN)/python -m bench.driving
	$(BIN)/python -m bench.scaling
	$(BIN)/python -m bench.recipe

# The README's picture, as this machine measures it.
picture: setup
	$(BIN)/python -m bench.picture

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb

# The checksum lets a test notice a lock that is older than the requirements.
lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --output-file env/requirements.lock env/requirements.txt
	sed -i "1i # sha256 of requirements.txt: $$(sha256sum < env/requirements.txt | cut -d' ' -f1)" \
		env/requirements.lock
