"""What a process trains: a task's model and optimizer, made, placed and measured."""
