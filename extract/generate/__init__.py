"""Prompts, requests and answers: generated here or by a server."""
