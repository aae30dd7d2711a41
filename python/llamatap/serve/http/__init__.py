"""HTTP around the app: the server process, its connections, and request checks before parsing."""
