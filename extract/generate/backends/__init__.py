"""What writes texts: a model that is loaded here, or a server."""
