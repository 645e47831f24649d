"""The commands of a user: one module each, found by `megalith.cli.main`. They import what they need when they run."""
