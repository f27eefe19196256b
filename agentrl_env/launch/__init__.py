"""Starting servers: child processes, threads, containers, and the images of containers."""
