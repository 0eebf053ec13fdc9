SHELL := /bin/bash
BIN := .venv/bin

.PHONY: setup run test lab lint

setup:
	@env/setup.sh

run: setup
	@$(BIN)/python -m helpers.run_notebooks

test: setup lint
	$(BIN)/pytest tests
	$(BIN)/pytest --nbmake notebooks

lab: setup
	$(BIN)/jupyter lab notebooks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb
