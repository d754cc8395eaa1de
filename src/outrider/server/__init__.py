"""The OpenAI-compatible HTTP server: routes, limits, keys, metrics, and the one engine thread."""
