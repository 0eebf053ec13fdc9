"""Plumbing of the course: one module, one job. Importing it has no effect."""
