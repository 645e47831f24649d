"""What a process shares with others: for one process, its random streams."""
