"""One module per command of `megalith`, dispatched by `megalith.cli.main`. Heavy imports happen inside the commands."""
