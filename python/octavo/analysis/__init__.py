"""What the machine can do, and how near a run came to it."""
