"""Starting things on this machine: a server as a child process, the folder of a new environment."""
