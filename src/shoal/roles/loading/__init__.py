"""What a job begins with: its task, and where it starts."""
