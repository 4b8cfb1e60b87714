"""What a large job costs its coordinator: the real service on a real socket, and agents that are only simulated."""
