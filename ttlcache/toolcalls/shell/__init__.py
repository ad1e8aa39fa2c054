"""What a shell command runs: its program and subcommand, of a bounded set of names."""
