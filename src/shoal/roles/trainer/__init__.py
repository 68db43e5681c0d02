"""`Trainer`: for people who own their process or their loop."""
