"""HTTP around the app: the server process, its connections, and checks of requests before they are parsed."""
