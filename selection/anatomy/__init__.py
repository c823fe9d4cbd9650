"""Where correctness can be read: what deployed encoders say when they are queried."""
